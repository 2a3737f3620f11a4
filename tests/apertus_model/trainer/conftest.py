"""Training that layouts are compared with."""

from pathlib import Path

import pytest

from tests.apertus_model.harness import Result
from tests.apertus_model.trainer.layouts import run, spec_of


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Result]:
    """One process that takes the whole batch at once."""
    folder = tmp_path_factory.mktemp("alone")
    return folder, run(folder, spec_of(checkpoint={"interval": 2}), states=True)
