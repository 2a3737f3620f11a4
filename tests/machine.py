"""What some tests want of the machine beyond Python's packages. They are skipped without it."""

import os
import sysconfig
from pathlib import Path
from shutil import which

import pytest

HEADERS = Path(sysconfig.get_path("include"), "Python.h")

compiles = pytest.mark.skipif(
    which(os.environ.get("CXX", "g++")) is None or not HEADERS.exists(),
    reason="torch.compile wants a C++ compiler and Python's headers: apt-get install g++ python3-dev",
)
