"""What some tests want of the machine beyond Python's packages, and those that want more time."""

import os
import sysconfig
from pathlib import Path
from shutil import which
from typing import Any

import pytest
from _pytest.mark.structures import ParameterSet

HEADERS = Path(sysconfig.get_path("include"), "Python.h")

compiles = pytest.mark.skipif(
    which(os.environ.get("CXX", "g++")) is None or not HEADERS.exists(),
    reason="torch.compile wants a C++ compiler and Python's headers: apt-get install g++ python3-dev",
)


def slow(*values: Any) -> ParameterSet:
    """A set of parameters that `make test-all` alone tries."""
    return pytest.param(*values, marks=pytest.mark.slow)
