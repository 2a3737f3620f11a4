"""How a stage tells its launcher why there is no result."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from specs.job import REPORT
from tests.infra.launchers.pretended import a_job


def test_a_stage_reports_its_error_in_its_output(tmp_path: Path) -> None:
    job = a_job(tmp_path).model_copy(
        update={"progress": REPORT, "kind": "no-such-kind", "store": str(tmp_path / "store")}
    )
    (tmp_path / "job.json").write_text(job.model_dump_json())
    command = [sys.executable, "-m", "apertus_model.stages", str(tmp_path / "job.json")]
    environment = os.environ | {"APERTUS_STOP_FILE": str(tmp_path / "stop")}
    done = subprocess.run(
        command,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    reports = [
        json.loads(line.removeprefix(REPORT)) for line in done.stdout.splitlines() if line.startswith(REPORT)
    ]
    assert done.returncode == 1 and "no-such-kind" in reports[0]["message"]
