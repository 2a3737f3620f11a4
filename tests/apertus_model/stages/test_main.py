"""How a stage tells its launcher why there is no result."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from specs.job import ERROR, Failure
from tests.jobs import job_at


def test_a_stage_reports_its_error_in_a_file(tmp_path: Path) -> None:
    job = job_at("no-such-kind/f", str(tmp_path / "store"), tmp_path, scratch=str(tmp_path))
    (tmp_path / "job.json").write_text(job.model_dump_json())
    done = subprocess.run(
        [sys.executable, "-m", "apertus_model.stages", str(tmp_path / "job.json")],
        env=os.environ | {"APERTUS_STOP_FILE": str(tmp_path / "stop")},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 1
    failure = Failure.model_validate_json((tmp_path / ERROR).read_text())
    assert "no-such-kind" in failure.message and not failure.again
