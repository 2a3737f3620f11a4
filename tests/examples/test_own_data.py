"""The example on own text: its recipe runs to an exported model, which transformers continues a text with."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "own_data"

pytestmark = pytest.mark.slow


def test_own_text_becomes_a_model_that_continues_a_text(tmp_path: Path) -> None:
    folder = tmp_path / "own_data"
    shutil.copytree(EXAMPLE, folder)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    run = [sys.executable, "-m", "flows.cli", "run", "recipe.yaml", "--store", "store"]
    done = subprocess.run(run, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (model,) = (folder / "store" / "export").glob("*/attempts/*")
    complete = [sys.executable, "complete.py", str(model), "A river"]
    told = subprocess.run(complete, cwd=folder, env=environment, capture_output=True, text=True)
    assert told.stdout.startswith("<s>A river "), told.stderr
