"""A training stage that ends by itself before its job does: the run ends as interrupted."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.e2e.conftest import SMOKE, Run


@pytest.mark.slow
def test_a_stage_whose_job_is_about_to_end_interrupts_the_run(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS", "120")
    monkeypatch.setenv("APERTUS_JOB_END", str(time.time() + 3600))  # an hour before it is over when training begins
    run = Run(home, "run", SMOKE, "--store", str(home / "ending"), "--until", "pretrain", "--set", "launch.stop_before_end=1h")
    assert run.wait(280) == 130, run.text
    assert "was interrupted: the job ends in 3600 s" in run.text
    assert "the same command goes on from there" in run.text
    assert "Traceback" not in run.text
    assert run.no_process_is_left(20)
