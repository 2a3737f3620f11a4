"""A task of a job array leaves with its stage."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from infra import liveness

ROOT = Path(__file__).resolve().parents[3]
WATCHED = """
import sys, time
from pathlib import Path
from apertus_model.data.array_task import _leave_with_stage
_leave_with_stage(Path(sys.argv[1]), 1.0)
"""


def test_a_task_leaves_when_its_stage_gives_no_sign_of_life(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(liveness, "BEAT_SECONDS", 0.1)
    alive = tmp_path / "alive"
    with liveness.beats_in_file(alive):
        task = subprocess.Popen(
            [sys.executable, "-c", WATCHED, str(alive)], stdout=subprocess.PIPE, text=True, cwd=ROOT
        )
        with pytest.raises(subprocess.TimeoutExpired):
            task.wait(3.0)
    assert task.wait(20.0) == 1
    assert task.stdout is not None
    assert task.stdout.read() == "no sign of life of the stage for 1 s: this task ends\n"
