"""A checkpoint that proves damaged while a stage loads it, through the runner: withdrawn with a message,
the one before is used."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from apertus_model.stages import __main__ as process
from apertus_model.stages import train
from apertus_model.stop import StopSignal
from apertus_model.trainer.checkpoint import load_tensors
from apertus_model.trainer.checkpoint_writer import CheckpointWriter
from flows.execution.runner import Runner, StageFailed
from flows.planning.plan import Plan, Step
from infra.launchers.local import Ended, error_of
from infra.store import Artifact, Attempt, DamagedError
from specs.job import Job
from tests.flows.conftest import finish, job_of

Planned = Callable[..., Plan]
PART = "pretrain/2"


def tensors(step: int) -> dict[str, torch.Tensor]:
    return {"weight": torch.full((64, 64), float(step)), "bias": torch.full((100,), float(step))}


def commit(attempt: Attempt, step: int) -> None:
    storage = CheckpointWriter(attempt.store, attempt.folder(attempt.checkpoint_folder(step)))
    dcp.save(tensors(step), storage_writer=storage, no_dist=True)
    attempt.commit_checkpoint(step, {"tokens": 0}, files=storage.records)


class Notes:
    """An observer that keeps the notes."""

    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, name: str, text: str) -> None:
        self.notes.append(text)

    def begin(self, step: Step) -> None: ...
    def line(self, name: str, text: str) -> None: ...
    def progress(self, name: str, row: dict[str, Any]) -> None: ...
    def end(self, step: Step, outcome: str, seconds: float, metrics: dict[str, Any] | None) -> None: ...


class Stages:
    """The launcher's processes, as calls in this one, and a training whose tensors all hold the number of
    the step. `resumed`: what each attempt has loaded; `rollback`: a step that it loads when it has begun."""

    def __init__(self, plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
        self.resumed: list[int | None] = []
        self.rollback: int | None = None
        node = plan.graph.nodes[PART]
        assert node.end_step is not None
        self.end = node.end_step
        finish(plan, *(name for name in plan.graph.parents(node)))
        early = Attempt(job_of(plan, node), plan.store)
        for step in range(self.end - 3, self.end):
            commit(early, step)
        monkeypatch.setattr("flows.execution.runner.launch_job", lambda job, *_, **__: self._launched(job))
        monkeypatch.setattr(train, "run", self._train)
        monkeypatch.setattr(StopSignal, "watch", lambda self, **_: None)

    def _launched(self, job: Job) -> Any:
        class Process:
            def run(self, *_: Any) -> Ended:
                file = Path(job.scratch) / "job.json"
                file.write_text(job.model_dump_json())
                return Ended(process.main(str(file)), "", ("nothing",), error_of(Path(job.scratch)))

            def stop(self, reason: str) -> None: ...

        return Process()

    def _train(self, attempt: Attempt, *_: Any) -> None:
        self.resumed.append(attempt.job.resume_step)
        begin = attempt.job.resume_step or 0
        for step in (begin, self.rollback):
            if step:
                state = {name: torch.zeros_like(tensor) for name, tensor in tensors(0).items()}
                load_tensors(state, attempt.artifact.checkpoint(step))
                assert all(torch.equal(state[name], tensor) for name, tensor in tensors(step).items())
        for step in range(max(begin + 1, self.end - 3), self.end + 1):
            commit(attempt, step)
        attempt.commit(metrics={}, step=self.end)


def flip(artifact: Artifact, step: int, name: str) -> None:
    place = Path(artifact.store.full(f"{artifact.checkpoint(step).folder}/{name}"))
    data = bytearray(place.read_bytes())
    data[len(data) // 2] ^= 4
    place.write_bytes(data)


def trained(plan: Plan) -> Artifact:
    node = plan.graph.nodes[PART]
    return Artifact(plan.store, node.path, node.end_step)


@pytest.mark.parametrize("name", ["rank-00000.safetensors", "index.json"])
def test_a_checkpoint_with_a_flipped_bit_is_withdrawn_and_the_one_before_it_is_used(
    planned: Planned, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    plan = planned()
    stages = Stages(plan, monkeypatch)
    artifact = trained(plan)
    last = stages.end - 1
    assert set(artifact.checkpoint(last).files) == {"rank-00000.safetensors", "index.json"}
    flip(artifact, last, name)
    notes = Notes()
    assert (
        Runner(plan, notes).run(plan.graph.nodes[PART]).action == "reuse"
    )  # in one call: no retry of the flow is used up
    assert stages.resumed == [last, last - 1]
    [note] = notes.notes
    assert f"checkpoint {last} is withdrawn, the one before it is used" in note
    assert f"{name}' is damaged" in note
    artifact.checkpoint(last).check()
    assert artifact.checkpoint(last).marker.attempt == artifact.manifest.attempt


def test_each_damaged_checkpoint_is_found_in_turn_down_to_a_new_beginning(
    planned: Planned, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = planned()
    stages = Stages(plan, monkeypatch)
    artifact = trained(plan)
    for step in artifact.checkpoint_steps():
        flip(artifact, step, "rank-00000.safetensors")
    Runner(plan, Notes()).run(plan.graph.nodes[PART])
    assert stages.resumed == [stages.end - 1, stages.end - 2, stages.end - 3, None]


def test_a_damaged_checkpoint_that_a_rollback_needs_is_made_again(
    planned: Planned, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = planned()
    stages = Stages(plan, monkeypatch)
    artifact = trained(plan)
    stages.rollback = stages.end - 2
    flip(artifact, stages.rollback, "rank-00000.safetensors")
    notes = Notes()

    def train_without(attempt: Attempt, *rest: Any) -> None:
        if stages.resumed:
            stages.rollback = None
        stages._train(attempt, *rest)

    monkeypatch.setattr(train, "run", train_without)
    Runner(plan, notes).run(plan.graph.nodes[PART])
    assert stages.resumed == [stages.end - 1, stages.end - 3]
    assert [note.split(" is")[0] for note in notes.notes] == [
        f"checkpoint {stages.end - 1}",
        f"checkpoint {stages.end - 2}",
    ]


def test_a_checkpoint_that_is_sound_when_it_is_read_again_is_kept(
    planned: Planned, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = planned()
    stages = Stages(plan, monkeypatch)
    artifact = trained(plan)
    kept = artifact.checkpoint_steps()

    def broken_memory(attempt: Attempt, *_: Any) -> None:
        raise artifact.checkpoint(stages.end - 1).damaged(DamagedError("'f' is damaged"))

    monkeypatch.setattr(train, "run", broken_memory)
    with pytest.raises(StageFailed, match="a second reading found no damage") as caught:
        Runner(plan, Notes()).run(plan.graph.nodes[PART])
    assert caught.value.again
    assert artifact.checkpoint_steps() == kept


def test_the_damaged_checkpoint_of_another_part_is_not_withdrawn(
    planned: Planned, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = planned()
    Stages(plan, monkeypatch)
    [parent] = [read for read in plan.graph.nodes[PART].inputs.values() if read.step is not None]
    other = Artifact(plan.store, plan.graph.nodes[parent.node or ""].path)
    flip(other, parent.step or 0, "weights")

    def load(attempt: Attempt, *_: Any) -> None:
        attempt.input_checkpoint("parent").check()

    monkeypatch.setattr(train, "run", load)
    with pytest.raises(StageFailed, match=r"is damaged: .*apertus verify --all --fix") as caught:
        Runner(plan, Notes()).run(plan.graph.nodes[PART])
    assert not caught.value.again
    assert parent.step in other.checkpoint_steps()
