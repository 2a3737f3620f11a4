"""The engine as a whole: bit-exact resume, the same batches and start on any layout, and one test per trap
of torchtitan."""

from pathlib import Path
from typing import Any

import pytest
import torch

from apertus_model.trainer.checkpoint import CheckpointSource
from apertus_model.trainer.checkpoint_reader import CheckpointError, CheckpointReader
from specs.optimizer import OptimizerSpec
from tests.apertus_model.harness import (
    MODEL,
    difference,
    losses,
    same,
    segment,
    train,
)
from tests.apertus_model.trainer.checkpoints import LocalCheckpoint, at, full_weights
from tests.machine import slow


def without_timing(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{key: row[key] for key in row if key not in ("time", "tokens_per_second")} for row in rows]


@pytest.mark.parametrize("processes", [1, 2])
def test_resuming_from_a_checkpoint_gives_the_same_bits(tmp_path: Path, processes: int) -> None:
    whole = train(tmp_path / "whole", segment(), processes=processes, states=True)[0]
    begin = {"source": at(tmp_path / "whole", 3), "begin_step": 3}
    rest = train(tmp_path / "rest", segment(), processes=processes, states=True, **begin)[0]
    assert same(rest.weights, whole.weights)
    assert same(rest.optimizer, whole.optimizer)
    assert without_timing(rest.rows) == without_timing(whole.rows[3:])


@pytest.mark.parametrize("processes", [slow(1), 2])
def test_a_stop_asked_of_one_rank_ends_all_with_a_checkpoint_that_continues_exactly(
    tmp_path: Path, processes: int
) -> None:
    whole = train(tmp_path / "whole", segment(), processes=processes)[0]
    stopped = train(tmp_path / "stopped", segment(), processes=processes, stop_at=4)
    assert not any(result.finished for result in stopped)
    assert stopped[0].committed == [3, 4]
    assert len(stopped[0].rows) == 4
    source = at(tmp_path / "stopped", 4)
    rest = train(tmp_path / "rest", segment(), processes=processes, source=source, begin_step=4)[0]
    assert rest.finished
    assert same(rest.weights, whole.weights)


def test_a_stop_before_the_first_step_leaves_nothing_behind(tmp_path: Path) -> None:
    result = train(tmp_path, segment(), stop_at=0)[0]
    assert not result.finished
    assert result.committed == []


@pytest.mark.parametrize(("processes", "micro_batch_size"), [(1, 4), slow(1, 1), slow(2, 2), (2, 1)])
def test_every_layout_trains_on_the_same_batches_in_the_same_order(
    tmp_path: Path, processes: int, micro_batch_size: int
) -> None:
    spec = segment(
        sample_offset=100, start_step=10, start_tokens=9999, end_step=12, micro_batch_size=micro_batch_size
    )
    results = train(tmp_path, spec, processes=processes)
    per_step = [
        [result.asked[step * 4 // processes : (step + 1) * 4 // processes] for result in results]
        for step in (0, 1)
    ]
    assert [sorted(index for indices in step for index in indices) for step in per_step] == [
        [100, 101, 102, 103],
        [104, 105, 106, 107],
    ]
    reference = train(tmp_path / "reference", spec)[0]
    assert losses(results[0]) == pytest.approx(losses(reference), abs=2e-6)
    assert [row["masked_share"] for row in results[0].rows] == [row["masked_share"] for row in reference.rows]
    assert difference(results[0].weights, reference.weights) < 1e-5


def test_a_checkpoint_goes_over_to_another_number_of_processes(tmp_path: Path) -> None:
    one = train(tmp_path / "one", segment())[0]
    two = train(tmp_path / "two", segment(), processes=2, source=at(tmp_path / "one", 3), begin_step=3)[0]
    assert difference(one.weights, two.weights) < 1e-5


def test_mixed_precision_and_recomputation_stay_close_to_full_precision(tmp_path: Path) -> None:
    exact = train(tmp_path / "exact", segment(end_step=3))[0]
    recomputed = train(tmp_path / "recomputed", segment(end_step=3, activation_checkpointing="full"))[0]
    mixed = train(tmp_path / "mixed", segment(end_step=3, precision={"param": "bfloat16"}))[0]
    assert losses(recomputed) == losses(exact)
    assert losses(mixed) == pytest.approx(losses(exact), abs=0.05)
    assert losses(mixed) != losses(exact)
    assert all(weight.dtype == torch.float32 for weight in mixed.weights.values())


@pytest.mark.parametrize("name", ["ademamix", "adamw"])
def test_the_last_checkpoint_holds_the_optimizer_and_tensors_only(tmp_path: Path, name: str) -> None:
    spec = segment(end_step=2, optimizer=OptimizerSpec(name=name, lr=1e-2).resolved({}))
    result = train(tmp_path, spec, states=True)[0]
    stored = full_weights(tmp_path / "step-2")  # the reader refuses anything but tensors
    assert int(stored["progress.step"]) == 2
    optimizer = {
        name.removeprefix("optimizer."): value
        for name, value in stored.items()
        if name.startswith("optimizer.")
    }
    assert same(optimizer, result.optimizer)
    assert {int(value) for name, value in optimizer.items() if name.endswith(".step")} == {2}


def test_a_checkpoint_in_the_output_folder_does_not_override_what_was_asked_for(tmp_path: Path) -> None:
    first = train(tmp_path, segment())[0]
    again = train(tmp_path, segment())[0]
    assert again.rows[0]["step"] == 1
    assert losses(again) == losses(first)


def test_consumed_tokens_are_right_after_a_change_of_the_number_of_processes(tmp_path: Path) -> None:
    train(tmp_path / "two", segment(), processes=2)
    rest = train(tmp_path / "one", segment(), source=at(tmp_path / "two", 3), begin_step=3)[0]
    assert [row["tokens"] for row in rest.rows] == [4 * 64, 5 * 64, 6 * 64]


def test_no_checkpoint_is_deleted_by_the_engine(tmp_path: Path) -> None:
    result = train(tmp_path, segment(end_step=12, checkpoint={"interval": 1, "keep": 1}))[0]
    assert result.committed == list(range(1, 13))
    assert {path.name for path in tmp_path.glob("step-*")} == {f"step-{step}" for step in range(1, 13)}


def test_weights_without_optimizer_begin_with_empty_moments(tmp_path: Path) -> None:
    parent = train(tmp_path / "parent", segment())[0]
    source = at(tmp_path / "parent", 6, optimizer=False)
    child = train(tmp_path / "child", segment(), source=source, begin_step=0, stop_at=0, states=True)[0]
    assert same(child.weights, parent.weights)
    assert not any(value.any() for value in child.optimizer.values())


def test_a_checkpoint_of_another_model_or_step_is_refused_with_the_reason(tmp_path: Path) -> None:
    train(tmp_path / "parent", segment())
    with pytest.raises(RuntimeError, match=r"holds step 6, the store says 5"):
        train(
            tmp_path / "a",
            segment(),
            source=CheckpointSource(LocalCheckpoint(tmp_path / "parent/step-6"), 5, True),
            begin_step=5,
        )
    wider = segment(model=MODEL.model_copy(update={"ffn_dim": 128}))
    with pytest.raises(RuntimeError, match=r"has shape \(64, 32\) in .*, this model has \(128, 32\)"):
        train(tmp_path / "b", wider, source=at(tmp_path / "parent", 6), begin_step=6)
    deeper = segment(model=MODEL.model_copy(update={"n_layers": 3}))
    with pytest.raises(RuntimeError, match=r"lacks \d+ of \d+ tensors, the first 'layers.2"):
        train(tmp_path / "c", deeper, source=at(tmp_path / "parent", 6), begin_step=6)


def test_a_checkpoint_is_never_executed(tmp_path: Path) -> None:
    import os
    import pickle

    class Evil:
        def __reduce__(self) -> tuple[Any, ...]:
            return os.system, ("touch " + str(tmp_path / "pwned"),)

    (tmp_path / "index.json").write_bytes(pickle.dumps(Evil()))
    with pytest.raises(CheckpointError, match="is damaged"):
        CheckpointReader(LocalCheckpoint(tmp_path)).read_metadata()
    assert not (tmp_path / "pwned").exists()
