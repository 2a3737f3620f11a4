"""`harness`, which runs the engine in forked processes, is shared by the tests of several folders."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture
def transformers_log(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.LogCaptureFixture]:
    """What transformers logs at its usual level, that of warnings."""
    from transformers.utils import logging

    monkeypatch.setattr(logging.get_logger("transformers"), "propagate", True)
    before = logging.get_verbosity()
    logging.set_verbosity_warning()
    yield caplog
    logging.set_verbosity(before)
