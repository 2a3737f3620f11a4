"""Training on a real Slurm: jobs whose time is too short, and a node that fails, end in the weights of one
uninterrupted run."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from infra.store import Artifact, Store
from tests.e2e.conftest import SMOKE, Run
from tests.e2e.test_smoke import plan_of
from tests.infra.slurm import LittleSlurm, little_slurm

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]
STEPS = 1000  # of several jobs, also on a fast machine
LONG = [f"stages.cooldown.budget={STEPS} steps", "stages.cooldown.checkpoint.interval=25"]
PROFILE = """
launcher: slurm
slurm: {partition: tests, time_limit: 60s, stop_before_end: 40s}
"""


def _finish(home: Path, store: Path, *arguments: str) -> Run:
    command = ["run", SMOKE, "--store", str(store), "--until", "cooldown"]
    return Run(home, *command, *arguments, overrides=LONG)


def _cooldown(store: Path) -> Artifact:
    return Artifact(Store.open(str(store)), plan_of(store, *LONG).graph.nodes["cooldown"].path, STEPS)


def _fail_the_node_once(slurm: LittleSlurm, begun: Artifact) -> None:
    """When a job has committed something, its node is declared dead; it comes back by itself."""
    while not begun.checkpoint_steps():
        time.sleep(0.1)
    slurm.ask("scontrol", "update", "NodeName=localhost", "State=DOWN", "Reason=test")


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LittleSlurm]:
    with little_slurm(tmp_path / "slurm") as running:
        for name, value in running.environment.items():
            monkeypatch.setenv(name, value)
        yield running


def test_short_jobs_and_a_node_that_fails_end_in_the_same_bits(
    slurm: LittleSlurm,
    finished: Path,
    home: Path,
    tmp_path: Path,
) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    for store in (here, there):
        shutil.copytree(finished, store)
        shutil.rmtree(store / "cooldown")
    alone = _finish(home, here)
    assert alone.wait(600) == 0, alone.text

    profile = tmp_path / "cluster.yaml"
    profile.write_text(PROFILE)
    run = _finish(home, there, "--profile", str(profile))
    threading.Thread(target=_fail_the_node_once, args=(slurm, _cooldown(there)), daemon=True).start()
    assert run.wait(1200) == 0, run.text
    assert run.no_process_is_left(20)
    assert slurm.ask("squeue", "--noheader", "--states=PD,R") == ""  # one may be completing
    submitted_again = [line for line in run.text.splitlines() if "submitted again" in line]
    assert sum("a node failed" in line for line in submitted_again) == 1, run.text
    assert sum("its time limit" in line for line in submitted_again) >= 2, run.text
    rows = [
        [(row["step"], row["loss"]) for row in _cooldown(store).history() if "loss" in row]
        for store in (here, there)
    ]
    assert [step for step, _ in rows[1]] == list(range(1, STEPS + 1))
    assert rows[0] == rows[1]
    digests = [
        {
            record.sha256
            for name, record in _cooldown(store).manifest.files.items()
            if name.endswith(".safetensors")
        }
        for store in (here, there)
    ]
    assert digests[0] == digests[1] and digests[0]
