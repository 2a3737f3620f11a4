"""Saving beside the training, by steps and by time, and refusing what was damaged."""

import os
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

from apertus_model.trainer.checkpoint import CheckpointSource, load_tensors
from apertus_model.trainer.checkpoint_reader import CheckpointError, CheckpointReader
from specs.launch import Parallel
from specs.optimizer import OptimizerSpec
from tests.apertus_model.harness import PreferenceRows, difference, losses, same, segment, train
from tests.apertus_model.trainer.checkpoints import LocalCheckpoint
from tests.machine import slow


@pytest.mark.parametrize("processes", [slow(1), 2])
def test_an_interval_of_time_is_rank_0s_and_all_ranks_save_after_the_same_step(
    tmp_path: Path, processes: int
) -> None:
    now = [0.0]

    def clock() -> float:  # read once a step, and after a save
        now[0] += 10.0 if os.environ["RANK"] == "0" else 1000.0
        return now[0]

    spec = segment(end_step=12, checkpoint={"interval": "35s", "milestones": [2]})
    results = train(tmp_path, spec, processes=processes, clock=clock)
    # Read at 10; steps 1 to 12 look 20, 30 (saves: 40), 50, 60, 70, 80 (40 s later: saves: 90), 100, 110,
    # 120, 130 (saves: 140), ...
    assert results[0].committed == [2, 6, 10, 12]
    reference = train(
        tmp_path / "reference", segment(end_step=12, checkpoint={"interval": 12}), processes=processes
    )[0]
    assert same(results[0].weights, reference.weights)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    train(folder, segment(end_step=3), processes=2)
    return folder / "step-3"


@pytest.mark.parametrize("name", ["rank-00000.safetensors", "rank-00001.safetensors", "index.json"])
@pytest.mark.parametrize("damage", ["truncated", "empty", "removed", "overwritten"])
def test_a_damaged_checkpoint_is_refused(trained: Path, tmp_path: Path, name: str, damage: str) -> None:
    import shutil

    folder = tmp_path / "checkpoint"
    shutil.copytree(trained, folder)
    data = (folder / name).read_bytes()
    changed = {"truncated": data[: len(data) // 2], "empty": b"", "overwritten": b"\xff" * len(data)}
    (folder / name).unlink()
    if damage != "removed":
        (folder / name).write_bytes(changed[damage])
    index = CheckpointReader(LocalCheckpoint(trained)).read_metadata().state_dict_metadata
    state = {key: torch.empty(entry.size, dtype=entry.properties.dtype) for key, entry in index.items()}
    load_tensors(dict(state), LocalCheckpoint(trained))
    with pytest.raises(CheckpointError, match=r"is damaged|is not complete"):
        load_tensors(state, LocalCheckpoint(folder))


def test_torch_alone_reads_the_shards_of_two_ranks(trained: Path) -> None:
    index = CheckpointReader(LocalCheckpoint(trained)).read_metadata().state_dict_metadata
    ours, theirs = (
        {key: torch.empty(entry.size, dtype=entry.properties.dtype) for key, entry in index.items()}
        for _ in range(2)
    )
    load_tensors(ours, LocalCheckpoint(trained))
    dcp.load(theirs, storage_reader=HuggingFaceStorageReader(str(trained)), no_dist=True)
    assert same(ours, theirs)
    assert any(len(entry.chunks) == 2 for entry in index.values())


# Another number of processes, another layout


CHANGES: dict[str, tuple[tuple[int, Parallel], tuple[int, Parallel]]] = {
    "1 to 2 by FSDP": ((1, Parallel()), (2, Parallel())),
    "2 by FSDP to 2 by TP": ((2, Parallel()), (2, Parallel(tp=2))),
    "2 by TP to 2 by FSDP": ((2, Parallel(tp=2)), (2, Parallel())),
    "2 by TP to 1": ((2, Parallel(tp=2)), (1, Parallel())),
}


def optimizer(name: str) -> OptimizerSpec:
    return OptimizerSpec(name=name, lr=1e-2).resolved({})


@pytest.mark.parametrize(
    ("change", "name", "kind"),
    [
        ("2 by FSDP to 2 by TP", "ademamix", "pretrain"),
        *(
            pytest.param(change, name, kind, marks=pytest.mark.slow)
            for change in CHANGES
            for name in ("ademamix", "muon")
            for kind in ("pretrain", "sft")
        ),
    ],
)
def test_a_run_resumes_in_another_layout_with_the_same_data_and_losses(
    tmp_path: Path, change: str, name: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Muon's iteration, which makes much of a rounding otherwise
    monkeypatch.setattr(torch.Tensor, "bfloat16", torch.Tensor.float)
    (before, layout), (after, other) = CHANGES[change]
    spec = segment(kind, optimizer=optimizer(name), parallel=layout)
    whole = train(tmp_path, spec, processes=before)[0]
    source = CheckpointSource(LocalCheckpoint(tmp_path / "step-3"), 3, optimizer=True)
    rest = train(
        tmp_path / "rest",
        spec.model_copy(update={"parallel": other}),
        processes=after,
        source=source,
        begin_step=3,
    )
    asked = sorted({index for result in rest for index in result.asked})
    assert asked[:12] == list(range(12, 24))  # steps 4 to 6; what lies behind was read ahead
    assert losses(rest[0]) == pytest.approx(losses(whole)[3:], abs=2e-5)
    assert difference(rest[0].weights, whole.weights) < 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["dpo", "qrpo"])
def test_preference_training_resumes_with_the_same_bits_and_on_two_processes_with_the_same_losses(
    tmp_path: Path, kind: str
) -> None:
    spec = segment(kind)
    whole = train(tmp_path, spec, data=PreferenceRows, states=True)[0]
    source = CheckpointSource(LocalCheckpoint(tmp_path / "step-3"), 3, optimizer=True)
    again = train(tmp_path / "again", spec, source=source, begin_step=3, data=PreferenceRows, states=True)[0]
    assert same(again.weights, whole.weights)
    assert same(again.optimizer, whole.optimizer)
    two = train(tmp_path / "two", spec, processes=2, source=source, begin_step=3, data=PreferenceRows)[0]
    assert losses(two) == pytest.approx(losses(whole)[3:], abs=2e-5)
