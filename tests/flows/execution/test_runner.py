"""Choosing what to resume from."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from flows.execution.runner import Interrupted, Runner, StageFailed
from flows.planning.plan import Plan, make
from infra.launchers.local import Ended, Process
from infra.launchers.slurm_job import SlurmJob
from infra.slurm import SlurmError
from infra.store import Artifact, StorageError, Store, StoreError
from infra.store.writing.lease import Leases, Timing
from infra.store.writing.retention import referred_steps
from specs.job import Failure
from specs.launch import Launch, Retries
from specs.profiles import Profile
from specs.recipe import load
from specs.units import Duration
from tests.flows.conftest import finish
from tests.flows.execution.notes import Notes
from tests.recipes import CHAT, write_recipe

Planned = Callable[..., Plan]
REFUSES = "echo Socket timed out on send/recv operation >&2; exit 1"


def test_a_damaged_checkpoint_is_withdrawn_and_the_one_before_it_is_used(planned: Planned) -> None:
    plan = planned()
    for step in (9, 10, 11):
        finish(plan, "pretrain/2", until=step)
    node = plan.graph.nodes["pretrain/2"]
    artifact = Artifact(plan.store, node.path)
    damaged = artifact.checkpoint(11)
    # what has its size is checked while it is loaded
    plan.store.fs.pipe_file(plan.store.full(f"{damaged.folder}/weights"), b"weight")
    notes = Notes()
    assert Runner(plan, notes).sound_checkpoint(node, 11) == 10
    assert len(notes.notes) == 1
    assert "checkpoint 11 is withdrawn" in notes.notes[0]
    assert artifact.checkpoint_steps() == [9, 10]
    # the step is committed again, by another attempt in a folder of its own
    finish(plan, "pretrain/2", until=11)
    assert artifact.checkpoint_steps() == [9, 10, 11]


def test_a_part_whose_last_checkpoint_is_withdrawn_is_not_finished_any_more(planned: Planned) -> None:
    plan = planned()
    for step in (14, 16):
        finish(plan, "pretrain/3", until=step)
    longer = planned("stages.pretrain.budget=30 steps")
    node = longer.graph.nodes["pretrain/3"]
    artifact = Artifact(plan.store, node.path, 16)
    assert (
        planned().steps["pretrain/3"].action == "reuse" and node.path == plan.graph.nodes["pretrain/3"].path
    )
    plan.store.fs.pipe_file(plan.store.full(f"{artifact.checkpoint(16).folder}/weights"), b"weight")
    marker = plan.store.read_bytes(artifact.manifest_path)
    assert Runner(longer, Notes()).sound_checkpoint(node, 16) == 14
    assert (planned().steps["pretrain/3"].action, planned().steps["pretrain/3"].resume_step) == ("resume", 14)
    [stamp] = plan.store.names("damaged")
    assert plan.store.read_bytes(f"damaged/{stamp}/{artifact.manifest_path}") == marker


def test_a_log_that_cannot_be_stored_does_not_hide_why_a_stage_failed(
    planned: Planned, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Stage(Process):
        def run(self, *arguments: Any) -> Ended:
            return Ended(1, "", (), Failure(message="the corpus is empty"))

    def fail(*arguments: Any) -> None:
        raise StorageError("the storage failed 7 times")

    monkeypatch.setattr("infra.launchers.Process", Stage)
    monkeypatch.setattr(Store, "upload", fail)
    plan, notes = planned(), Notes()
    with pytest.raises(StageFailed, match=r"tokenizer: the corpus is empty \(log: could not be stored\)"):
        Runner(plan, notes).run(plan.graph.nodes["tokenizer"])
    assert notes.notes == ["tokenizer: its log could not be stored: the storage failed 7 times"]


def test_nothing_is_resumed_from_where_nothing_is_stored(planned: Planned) -> None:
    plan = planned()
    assert Runner(plan, Notes()).sound_checkpoint(plan.graph.nodes["pretrain/2"], None) is None


def test_a_stage_stopped_from_outside_interrupts_the_run(
    planned: Planned, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Stage(Process):
        def run(self, *arguments: Any) -> Ended:
            return Ended(0, "", (), Failure(message="the job ends in 300 s", interrupted=True))

    monkeypatch.setattr("infra.launchers.Process", Stage)
    plan = planned()
    runner = Runner(plan, Notes())
    runner.prepare()
    first = next(name for name, node in plan.graph.nodes.items() if not plan.graph.parents(node))
    with pytest.raises(Interrupted, match="was interrupted: the job ends in 300 s"):
        runner.run(runner.plan.graph.nodes[first])
    with pytest.raises(Interrupted, match="was not started: the job ends in 300 s"):
        runner.run(runner.plan.graph.nodes[first])


def test_a_job_has_the_workers_of_the_profile_where_the_recipe_states_none(
    planned: Planned, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Launch] = []

    class Stage(Process):
        def run(self, *arguments: Any) -> Ended:
            assert self.job.launch == self.launch
            seen.append(self.launch)
            return Ended(0, "", (), Failure(message="seen", interrupted=True))

    monkeypatch.setattr("infra.launchers.Process", Stage)
    profile = Profile.model_validate({"executor": "slurm", "workers": {"units_per_job": 50, "count": 9}})
    for plan in planned(), planned("stages.corpus.launch={executor: local, workers: {count: 1}}"):
        runner = Runner(plan, Notes(), profile=profile)
        runner.prepare()
        with pytest.raises(Interrupted):
            runner.run(runner.plan.graph.nodes["corpus/notes"])
    found = [(one.executor, one.worker_count) for one in seen]
    assert found == [("slurm", 9), ("local", 1)]


def test_a_job_has_the_gpus_of_the_model_that_its_worker_holds(tmp_path: Path, store: Store) -> None:
    overrides = (
        "stages.pretrain.model.n_kv_heads=2",
        "stages.preferences.completions.engine=vllm",
        "stages.preferences.launch={processes: 2, parallel: {tp: 2}}",
    )
    plan = make(load(write_recipe(tmp_path, CHAT), overrides), store)
    lease: Any = SimpleNamespace(holder=SimpleNamespace(attempt="first"), generation=1)
    for name, gpus in ("preferences/completions", 2), ("preferences/prompts", 0):
        job = Runner(plan, Notes())._job(plan.graph.nodes[name], plan.steps[name], tmp_path, lease)
        assert job.gpus == gpus


def test_a_job_that_the_cluster_did_not_take_is_worth_another_try(
    planned: Planned, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = planned("retries.backoff=0s")
    first = next(name for name, node in plan.graph.nodes.items() if not plan.graph.parents(node))

    class Stage(SlurmJob):
        def _wait(self, number: str) -> str:
            finish(plan, first)
            return "COMPLETED"

    monkeypatch.setattr("infra.launchers.SlurmJob", Stage)
    (tmp_path / "bin").mkdir()
    for name, line in {
        "sbatch": f"test -e {tmp_path}/tried && echo 7 || {{ touch {tmp_path}/tried; {REFUSES}; }}",
        "scancel": "true",
    }.items():
        (tmp_path / "bin" / name).write_text(f"#!/bin/sh\n{line}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    runner = Runner(plan, Notes(), profile=Profile(launcher="slurm", stages="all"))
    runner.prepare()
    with pytest.raises(StageFailed, match="sbatch refused the job: Socket timed out") as caught:
        runner.run(runner.plan.graph.nodes[first])
    assert caught.value.again
    assert runner.run(runner.plan.graph.nodes[first]).action == "reuse"


def test_a_run_refers_to_the_checkpoints_that_its_parts_start_from(planned: Planned) -> None:
    plan = planned()
    Runner(plan, Notes()).prepare()
    wanted: dict[str, set[int]] = {}
    for node in plan.graph.nodes.values():
        for read in node.inputs.values():
            if read.node is not None and read.step is not None:
                wanted.setdefault(plan.graph.nodes[read.node].path, set()).add(read.step)
    assert wanted
    assert {path: referred_steps(plan.store, path) for path in wanted} == wanted


class Failing(Process):
    """A stage that fails for a reason worth another try, after it has done what the next of `TODO` does."""

    todo: ClassVar[list[Callable[[], object]]] = []
    commits_for = 0.0

    def run(self, *arguments: Any) -> Ended:
        self.todo.pop(0)()
        lost = Failure(message="the node lost its network", again=True)
        return Ended(1, "", (), lost, commits_for=self.commits_for)


def failures(runner: Runner, name: str) -> list[bool]:
    """Of the attempts, one after another, whether each says that another may follow."""
    again = []
    while Failing.todo:
        with pytest.raises(StageFailed, match="the node lost its network") as caught:
            runner.run(runner.plan.graph.nodes[name])
        again.append(caught.value.again)
    return again


@pytest.fixture
def failing(planned: Planned, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], tuple[Plan, Runner]]:
    monkeypatch.setattr("infra.launchers.Process", Failing)

    def make(attempts: str) -> tuple[Plan, Runner]:
        plan = planned(f"retries.attempts={attempts}", "retries.backoff=0s")
        finish(plan, "pretrain/1")
        finish(plan, "pretrain/2", until=9)
        return plan, Runner(plan, Notes())

    return make


def test_a_stage_that_gets_nowhere_is_tried_as_often_as_the_recipe_says(
    failing: Callable[[str], tuple[Plan, Runner]],
) -> None:
    _, runner = failing("2")
    Failing.todo = [lambda: None] * 3
    assert failures(runner, "pretrain/2") == [True, True, False]
    _, runner = failing("0")
    Failing.todo = [lambda: None]
    assert failures(runner, "pretrain/2") == [False]


def test_an_attempt_that_committed_something_counts_as_a_first_one(
    failing: Callable[[str], tuple[Plan, Runner]],
) -> None:
    """A stage that takes weeks and loses a node each day ends all the same."""
    plan, runner = failing("1")
    get_on = [lambda step=step: finish(plan, "pretrain/2", until=step) for step in (10, 11)]
    Failing.todo = [lambda: None, *get_on, lambda: None]
    assert failures(runner, "pretrain/2") == [True, True, True, False]


def test_a_storage_that_is_away_while_a_part_is_begun_is_waited_for(
    failing: Callable[[str], tuple[Plan, Runner]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: Any) -> None:
        raise StorageError("the storage failed 7 times")

    _, runner = failing("2")
    monkeypatch.setattr(Store, "names", fail)
    again = []
    for _ in range(3):
        with pytest.raises(StageFailed, match="the storage failed 7 times") as caught:
            runner.run(runner.plan.graph.nodes["pretrain/2"])
        again.append(caught.value.again)
    assert again == [True, True, False]


def test_waiting_for_the_next_attempt_ends_when_the_run_is_stopped(
    failing: Callable[[str], tuple[Plan, Runner]], monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, _ = failing("2")
    notes = Notes()
    runner = Runner(
        replace(plan, pipeline=plan.pipeline.model_copy(update={"retries": Retries(backoff=Duration(7.0))})),
        notes,
    )
    Failing.todo = [lambda: None]
    failures(runner, "pretrain/2")
    waits = []
    monkeypatch.setattr(
        runner._stopped, "wait", lambda seconds: waits.append(seconds) or runner.stop("Ctrl-C")
    )
    with pytest.raises(Interrupted, match="was not started: Ctrl-C"):
        runner.run(runner.plan.graph.nodes["pretrain/2"])
    assert waits == [7.0]
    assert notes.notes[-1] == "pretrain/2: the next attempt begins in 7 s"


@pytest.mark.parametrize("commits", [True, False])
def test_a_stage_that_nobody_follows_keeps_its_lease_until_it_has_committed(
    failing: Callable[[str], tuple[Plan, Runner]], monkeypatch: pytest.MonkeyPatch, commits: bool
) -> None:
    plan, runner = failing("0")
    monkeypatch.setattr(Failing, "commits_for", 100.0)
    path, looks, clock = plan.graph.nodes["pretrain/2"].path, list[bool](), [0.0]

    def sleep(seconds: float) -> None:
        clock[0] += seconds
        looks.append(Leases(plan.store, path).look().free)
        if commits and len(looks) == 2:
            finish(plan, "pretrain/2", until=10)

    def own_clock() -> float:
        return clock[0]

    monkeypatch.setattr(
        "flows.execution.runner.time", SimpleNamespace(sleep=sleep, monotonic=own_clock, time=time.time)
    )
    Failing.todo = [lambda: None]
    assert failures(runner, "pretrain/2") == [False]
    assert not any(looks)
    assert clock[0] == pytest.approx(2 * Timing().look if commits else 100, abs=Timing().look)
    assert Leases(plan.store, path).look().free


def test_a_cluster_that_took_jobs_before_is_asked_for_longer(
    failing: Callable[[str], tuple[Plan, Runner]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slurm's controller may be away for hours in the weeks of a run."""

    def refuse(self: Process, *arguments: Any) -> Ended:
        raise SlurmError("sbatch refused the job: Unable to contact slurm controller")

    _, runner = failing("1")
    Failing.todo = [lambda: None]
    failures(runner, "pretrain/2")
    monkeypatch.setattr(Failing, "run", refuse)
    for _ in range(20):
        with pytest.raises(StageFailed, match="Unable to contact") as caught:
            runner.run(runner.plan.graph.nodes["pretrain/2"])
        assert caught.value.again
    runner = Runner(runner.plan, Notes())
    for again in (True, False):
        with pytest.raises(StageFailed, match="Unable to contact") as caught:
            runner.run(runner.plan.graph.nodes["pretrain/2"])
        assert caught.value.again is again


def test_a_store_that_only_this_process_sees_is_refused_before_anything_runs(recipe: Path) -> None:
    plan = make(load(recipe), Store.open("memory://only-here"))
    with pytest.raises(
        StoreError, match=r"memory://.*only-here is in the memory of this process.*name a folder"
    ):
        Runner(plan, Notes()).prepare()
