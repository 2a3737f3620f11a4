"""Attempts on a Ray cluster as a run sees them: a process of this machine that follows the stage."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from infra.launchers import Ended, launch_job
from infra.launchers.ray_process import RayProcess
from specs.job import ProgressRow
from specs.launch import Launch
from specs.profiles import Profile
from tests.infra.ray import no_actor_is_left
from tests.jobs import job_at

pytest.importorskip("ray", reason="the extra `ray` is not installed")

ROW = ProgressRow(done=1, total=2, unit="x")
STAGE = f"""#!/bin/sh
for job; do :; done
echo '{ROW.model_dump_json()}' > "$(dirname "$job")/progress.jsonl"
echo up; cat; echo told to stop
exit 3
"""


class Attempt:
    """An attempt whose stage is a shell script, which ends when it is told to."""

    def __init__(self, folder: Path, address: str, *, distributed: bool = False) -> None:
        python = folder / "python"
        python.write_text(STAGE)
        python.chmod(0o755)
        ray = {"address": address, "gpus": False, "cpus_per_node": 1}
        settings: dict[str, Any] = {"launcher": "ray", "stages": "all", "ray": ray, "python": str(python)}
        profile = Profile.model_validate(settings)
        job = job_at("script/f", str(folder), folder, node="stage", scratch=str(folder))
        job = job.model_copy(update={"profile": profile})
        process = launch_job(job, Launch(), profile, distributed=distributed)
        assert isinstance(process, RayProcess)
        self.process = process
        self.lines: list[str] = []
        self.rows: list[ProgressRow] = []

    def go(self) -> Ended:
        return self.process.run(self.lines.append, self.rows.append)

    def meanwhile(self, act: Callable[[RayProcess], None]) -> Ended:
        """Runs the attempt, and acts once its stage is up."""

        def wait() -> None:
            while "up" not in self.lines:
                time.sleep(0.05)
            act(self.process)

        threading.Thread(target=wait, daemon=True).start()
        return self.go()


def pid_of(process: RayProcess) -> int:
    assert process._process is not None
    return process._process.pid


def test_a_stage_is_followed_to_its_end(tmp_path: Path, ray_address: str) -> None:
    def act(process: RayProcess) -> None:
        for number in (signal.SIGTERM, signal.SIGINT):  # as a service manager does; they are for the run
            os.kill(pid_of(process), number)
        process.stop("by a test")

    attempt = Attempt(tmp_path, ray_address)
    ended = attempt.meanwhile(act)
    assert (ended.code, ended.stopped, ended.error) == (3, "by a test", None)
    assert attempt.lines[-2:] == ["up", "told to stop"] == [*ended.tail[-2:]]
    assert attempt.rows == [ROW]
    assert no_actor_is_left("NodeProcess")


@pytest.mark.parametrize("distributed", [True, False])
def test_a_driver_that_ray_ends_is_a_failed_attempt(
    tmp_path: Path, ray_address: str, distributed: bool
) -> None:
    """What trains, and has made a step, commits meanwhile."""
    attempt = Attempt(tmp_path, ray_address, distributed=distributed)
    ended = attempt.meanwhile(lambda process: os.kill(pid_of(process), signal.SIGKILL))
    assert (ended.code, ended.stopped, ended.error) == (-signal.SIGKILL, "", None)
    assert ended.commits_for == (attempt.process.grace if distributed else 0)
    assert no_actor_is_left("NodeProcess", 60)


def test_a_cluster_that_does_not_answer_is_an_error_for_users(tmp_path: Path) -> None:
    ended = Attempt(tmp_path, "127.0.0.1:9", distributed=True).go()
    assert ended.commits_for == 0
    assert ended.error is not None and not ended.error.again
    assert ended.error.message.startswith("no Ray cluster answers at 127.0.0.1:9")
