"""Jobs of a real Slurm: what comes back, what stops them, what is left in the queue."""

from __future__ import annotations

import os
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from infra.slurm import SlurmError
from specs.job import Failure, ProgressRow
from tests.infra.launchers.slurm_scripts import Script
from tests.infra.slurm import LittleSlurm, little_slurm

pytestmark = pytest.mark.usefixtures("impatient")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LittleSlurm]:
    with little_slurm(tmp_path_factory.mktemp("slurm") / "daemons") as real:
        before = {name: os.environ.get(name) for name in real.environment}
        os.environ.update(real.environment)
        yield real
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


COOPERATES = """
import sys
from apertus_model.stop import StopSignal
stop = StopSignal(); stop.watch(cooperative=True)
print("up", flush=True)
stop.wait(120)
print("committed:", stop.reason, flush=True)
"""


def test_lines_progress_error_and_exit_code_come_back(cluster: LittleSlurm, tmp_path: Path) -> None:
    program = f"""
import json, os, pathlib, sys
folder = pathlib.Path({str(tmp_path / "job")!r})
progress = {{"done": 1, "total": 2, "unit": "x", "metrics": {{}}}}
with open(folder / "progress.jsonl", "a") as file: file.write(json.dumps(progress) + "\\n")
(folder / "error.json").write_text(json.dumps({{"message": "no", "again": False}}))
print("threads", os.environ["OMP_NUM_THREADS"])
sys.exit(7)
"""
    job = Script(tmp_path / "job", program)
    ended = job.go()
    assert (ended.code, ended.stopped, ended.requeue) == (7, "", "")
    assert ended.error == Failure(message="no")
    assert "threads 1" in job.lines and job.lines[0].startswith("submitted as Slurm job ")
    assert job.rows == [ProgressRow(done=1, total=2, unit="x")]


def test_a_stage_that_is_told_to_stop_commits_first_and_nothing_is_left_in_the_queue(
    cluster: LittleSlurm, tmp_path: Path
) -> None:
    job = Script(tmp_path / "job", COOPERATES, cpus_per_task=2)
    steps: list[str] = []
    _when(
        lambda: "up" in job.lines,
        lambda: (steps.append(cluster.ask("scontrol", "show", "step")), job.stop("cancelled")),
    )
    ended = job.go()
    assert " CPUs=2 " in steps[0]
    assert (ended.code, ended.stopped, ended.requeue) == (0, "cancelled", "")
    assert "committed: the launcher asked for it, or the job is about to end" in job.lines
    assert cluster.ask("squeue", "--noheader", "--states=PD,R") == ""  # one may be completing


def test_a_stage_has_the_time_that_the_profile_announces(
    cluster: LittleSlurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("infra.launchers.local.STOP_SECONDS", 0.2)
    monkeypatch.setattr("infra.launchers.cluster.END_SECONDS", 0.2)
    short = "import apertus_model.stop as stops, time; stops.GRACE_SECONDS = 0.2\n"
    slow = COOPERATES.replace('print("committed', 'time.sleep(2); print("committed')
    job = Script(tmp_path / "job", short + slow, time_limit="10m", stop_before_end="30s")
    _when(lambda: "up" in job.lines, lambda: job.stop("cancelled"))
    assert job.go().code == 0
    assert "committed: the launcher asked for it, or the job is about to end" in job.lines


@pytest.mark.slow
def test_the_end_of_the_time_limit_is_announced_and_counts_as_ended_by_the_cluster(
    cluster: LittleSlurm, tmp_path: Path
) -> None:
    job = Script(tmp_path / "job", COOPERATES, time_limit="60s", stop_before_end="50s")
    ended = job.go()
    assert (ended.code, ended.stopped) == (0, "")
    assert ended.requeue.endswith("its time limit was near")
    assert any(line.startswith("committed:") for line in job.lines)


def test_a_node_that_dies_is_reported_and_excluded(cluster: LittleSlurm, tmp_path: Path) -> None:
    job = Script(tmp_path / "job", COOPERATES)
    _when(
        lambda: "up" in job.lines,
        lambda: cluster.ask("scontrol", "update", "NodeName=localhost", "State=DOWN", "Reason=test"),
    )
    try:
        ended = job.go()
        assert ended.requeue.endswith("a node failed")
        assert ended.dead_nodes == ("localhost",)
        again = Script(tmp_path / "again", "print('up')")
        again.exclude = list(ended.dead_nodes)
        # it comes back by itself
        _until(lambda: cluster.ask("sinfo", "--noheader", "--format=%T").strip() == "idle")
        assert again.go().code == 0
        assert "without localhost: sbatch refused" in again.lines[0]
    finally:
        if cluster.ask("sinfo", "--noheader", "--format=%T").strip() == "down":
            cluster.ask("scontrol", "update", "NodeName=localhost", "State=RESUME")


def test_a_job_that_slurm_refuses_is_an_error_with_its_words(cluster: LittleSlurm, tmp_path: Path) -> None:
    with pytest.raises(SlurmError, match=r"sbatch refused the job: .*partition"):
        Script(tmp_path / "job", COOPERATES, partition="nowhere").go()


def test_a_job_that_waits_in_the_queue_is_cancelled_at_once(cluster: LittleSlurm, tmp_path: Path) -> None:
    cluster.ask("scontrol", "update", "PartitionName=tests", "State=DOWN")
    try:
        job = Script(tmp_path / "job", COOPERATES)
        _when(lambda: any(line.startswith("submitted") for line in job.lines), lambda: job.stop("cancelled"))
        begun = time.monotonic()
        assert job.go().stopped == "cancelled"
        assert time.monotonic() - begun < 60
    finally:
        cluster.ask("scontrol", "update", "PartitionName=tests", "State=UP")


def test_a_stage_whose_launcher_is_gone_notices_by_its_file(tmp_path: Path) -> None:
    program = """
import apertus_model.stop as stops
stops.LOST_SECONDS, stops.POLL_SECONDS = 0.5, 0.05
stop = stops.StopSignal(); stop.watch(cooperative=True)
stop.wait(60)
print(stop.reason)
"""
    (tmp_path / "alive").write_text("1")
    environment = os.environ | {
        "APERTUS_STOP_FILE": str(tmp_path / "stop"),
        "APERTUS_ALIVE_FILE": str(tmp_path / "alive"),
    }
    command = [os.sys.executable, "-c", program]  # type: ignore[attr-defined]
    told = subprocess.run(
        command,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert told.stdout == "the launcher is gone\n"


def _until(condition: Callable[[], bool], timeout: float = 60) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, f"not after {timeout} s"
        time.sleep(0.1)


def _when(condition: Callable[[], bool], then: Callable[[], object], timeout: float = 60) -> None:
    """Does something, in a thread, when a condition is met."""

    def wait() -> None:
        deadline = time.monotonic() + timeout
        while not condition():
            if time.monotonic() > deadline:
                return
            time.sleep(0.05)
        then()

    threading.Thread(target=wait, daemon=True).start()
