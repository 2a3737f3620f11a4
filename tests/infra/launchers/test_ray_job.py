"""Stages on nodes of a Ray cluster, which are processes of this machine."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from infra.launchers import ray_job
from infra.launchers.local import Ended
from infra.launchers.ray_job import Place, RayJob
from infra.ray_cluster import ClusterNeeds
from specs.job import ERROR, Failure, ProgressRow
from specs.launch import Launch
from specs.profiles import Profile
from tests.infra.ray import actors, no_actor_is_left
from tests.jobs import job_at

pytest.importorskip("ray", reason="the extra `ray` is not installed")

ENDS_WITH_STDIN = "import sys; print('up', flush=True); sys.stdin.read(); print('told to stop', flush=True)"


class Script(RayJob):
    """An attempt whose processes on the nodes are a few lines of Python; the first argument is the number of
    the node."""

    def __init__(self, folder: Path, address: str, program: str, processes: int = 1, **launch: Any) -> None:
        folder.mkdir(exist_ok=True)
        job = job_at("script/f", str(folder), folder, node="stage", scratch=str(folder))
        ray = {"address": address, "gpus": False, "cpus_per_node": 1}
        profile = Profile.model_validate({"launcher": "ray", "ray": ray})
        stated = Launch(processes=processes, threads=1, **launch)
        super().__init__(job, stated, profile, distributed=processes > 1)
        self.text = program
        self.lines: list[str] = []
        self.rows = Path(job.progress)
        self.error = folder / ERROR

    def program(self, node: int, first: Place) -> list[str]:
        self.first = first
        return [sys.executable, "-c", self.text, str(node)]

    def go(self) -> Ended:
        return self.run(self.lines.append)

    def meanwhile(self, line: str, act: Callable[[], None]) -> Ended:
        """Runs the attempt, and acts once a line was printed."""

        def wait() -> None:
            while line not in self.lines:
                time.sleep(0.05)
            act()

        threading.Thread(target=wait, daemon=True).start()
        return self.go()


def test_lines_rows_errors_and_exit_codes_reach_the_launcher(tmp_path: Path, ray_address: str) -> None:
    row, failure = ProgressRow(done=1, total=2, unit="x"), Failure(message="no")
    program = f"""
import json, os, sys
job = json.load(open(sys.argv[2]))
open(job["progress"], "w").write({row.model_dump_json()!r})
open(os.path.join(job["scratch"], {ERROR!r}), "w").write({failure.model_dump_json()!r})
print("threads", os.environ["OMP_NUM_THREADS"])
sys.exit(7)
"""
    attempt = Script(tmp_path, ray_address, program)
    ended = attempt.go()
    assert (ended.code, ended.stopped, ended.error) == (7, "", failure)
    assert ProgressRow.model_validate_json(attempt.rows.read_text()) == row
    assert Failure.model_validate_json(attempt.error.read_text()) == failure
    assert attempt.lines[1:] == ["threads 1"]
    assert no_actor_is_left("NodeProcess")


def test_a_stage_that_is_told_to_stop_ends_by_itself(tmp_path: Path, ray_address: str) -> None:
    attempt = Script(tmp_path, ray_address, ENDS_WITH_STDIN, processes=2)
    ended = attempt.meanwhile("up", lambda: attempt.stop("by a test"))
    assert (ended.code, ended.stopped, ended.requeue) == (0, "by a test", "")
    assert attempt.lines.count("told to stop") == 2  # on both nodes


def test_a_stage_that_is_too_slow_to_stop_is_killed(
    tmp_path: Path, ray_address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempt = Script(tmp_path, ray_address, "import time; print('up', flush=True); time.sleep(600)")
    attempt.grace = 1.0
    ended = attempt.meanwhile("up", lambda: attempt.stop("by a test"))
    assert (ended.code, ended.stopped) == (1, "by a test")
    assert no_actor_is_left("NodeProcess")


def test_a_lost_node_ends_the_attempt_and_is_named(tmp_path: Path, ray_address: str) -> None:
    attempt = Script(tmp_path, ray_address, ENDS_WITH_STDIN, processes=2)
    ended = attempt.meanwhile("up", lambda: os.kill(actors("NodeProcess")[0], signal.SIGKILL))
    assert ended.code == 1 and not ended.stopped
    assert "was lost: ActorDiedError" in ended.requeue
    assert len(ended.dead_nodes) == 1
    assert no_actor_is_left("NodeProcess")


def test_the_time_limit_counts_from_the_start_of_the_processes(tmp_path: Path, ray_address: str) -> None:
    attempt = Script(tmp_path, ray_address, ENDS_WITH_STDIN, time_limit="2s")
    ended = attempt.go()
    assert (ended.code, ended.stopped) == (0, "the time limit of 2s was reached")


def test_what_no_node_can_give_is_said(
    tmp_path: Path, ray_address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_job, "PATIENCE_SECONDS", 0.0)
    attempt = Script(tmp_path, ray_address, ENDS_WITH_STDIN)
    attempt.needs = ClusterNeeds(64, nodes=1)

    def say(line: str) -> None:
        attempt.lines.append(line)
        attempt.stop("by a test")

    assert attempt.run(say).stopped == "by a test"
    assert "waiting for 1 node with 64 CPUs, 0 GPUs" in attempt.lines[0]
    assert "has 1 CPUs, 0 GPUs" in attempt.lines[0]


def test_a_node_that_failed_is_avoided_while_there_are_others(tmp_path: Path, ray_address: str) -> None:
    first = Script(tmp_path, ray_address, "print('up')")
    first.go()
    again = Script(tmp_path, ray_address, "print('up')")
    again.exclude = [first.first.name]
    again.go()
    assert again.first.name != first.first.name
    both = Script(tmp_path, ray_address, "print('up')", processes=2)
    both.exclude = again.exclude
    both.go()
    assert both.lines[0] == f"nodes that failed before are used again: {first.first.name}"
    assert both.lines.count("up") == 2
