"""The engine as a whole: bit-exact resume, the same batches and start on any layout, and one test per trap of torchtitan."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from harness import (
    MODEL,
    Sample,
    SyntheticSamples,
    difference,
    full,
    losses,
    same,
    segment,
    train,
)

from apertus_model.model.model import model_config
from apertus_model.optimizers.registry import NOT_DECAYED
from apertus_model.trainer.checkpoint import Source, raise_cause
from apertus_model.trainer.checkpoint_reader import CheckpointError, reader
from apertus_model.trainer.checkpoint_writer import CheckpointWriter
from apertus_model.trainer.evaluator import Evaluator
from apertus_model.trainer.loader import collate
from apertus_model.trainer.optimizer import Optimizers, optimizer_config
from infra.store import Store
from specs.launch import Parallel
from specs.optimizer import OptimizerSpec
from specs.schedule import Schedule


def at(folder: Path, step: int, *, optimizer: bool = True) -> Source:
    return Source(str(folder / f"step-{step}"), step, optimizer)


def without_timing(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{key: row[key] for key in row if key not in ("time", "tokens_per_second")} for row in rows]


@pytest.mark.parametrize("processes", [1, 2])
def test_going_on_from_a_checkpoint_gives_the_same_bits(tmp_path: Path, processes: int) -> None:
    whole = train(tmp_path / "whole", segment(), processes=processes)[0]
    source = at(tmp_path / "whole", 3)
    rest = train(tmp_path / "rest", segment(), processes=processes, source=source, begin_step=3)[0]
    assert same(rest.weights, whole.weights)
    assert same(rest.optimizer, whole.optimizer)
    assert without_timing(rest.rows) == without_timing(whole.rows[3:])


@pytest.mark.parametrize("processes", [1, 2])
def test_a_stop_asked_of_one_rank_ends_all_with_a_checkpoint_that_continues_exactly(tmp_path: Path, processes: int) -> None:
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


@pytest.mark.parametrize(("processes", "micro_batch_size"), [(1, 4), (1, 1), (2, 2), (2, 1)])
def test_every_layout_trains_on_the_same_batches_in_the_same_order(tmp_path: Path, processes: int, micro_batch_size: int) -> None:
    spec = segment(sample_offset=100, start_step=10, start_tokens=9999, end_step=12, micro_batch_size=micro_batch_size)
    results = train(tmp_path, spec, processes=processes)
    per_step = [[result.asked[step * 4 // processes : (step + 1) * 4 // processes] for result in results] for step in (0, 1)]
    assert [sorted(index for indices in step for index in indices) for step in per_step] == [[100, 101, 102, 103], [104, 105, 106, 107]]
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


# The traps of torchtitan that ENGINE_NOTES names, and others of their kind.


def test_the_new_spec_wins_over_what_the_optimizer_of_the_parent_remembers(tmp_path: Path) -> None:
    train(tmp_path / "parent", segment())
    changed = segment(
        start_step=0,
        end_step=1,
        schedule=Schedule(peak=3e-4),
        optimizer=OptimizerSpec(lr=3e-4, weight_decay=0.7).resolved({}),
    )
    child = train(tmp_path / "child", changed, source=at(tmp_path / "parent", 6), begin_step=0)[0]
    assert child.learning_rates == [3e-4, 3e-4]
    assert child.weight_decays == [0.0, 0.7]
    assert child.rows[0]["lr"] == 3e-4
    parent = full_weights(tmp_path / "parent" / "step-6")
    moved = difference(child.weights, {name: parent[name] for name in child.weights})
    assert 0 < moved < 3e-3  # the first step is made with the new rate; at the old one of 1e-2 it would move ~0.1


def full_weights(folder: Path) -> dict[str, torch.Tensor]:
    from torch.distributed.checkpoint import load

    index = reader(str(folder)).read_metadata().state_dict_metadata
    state = {name: torch.empty(entry.size, dtype=entry.properties.dtype) for name, entry in index.items()}
    load(state, storage_reader=reader(str(folder)), no_dist=True)
    return state


@pytest.mark.parametrize("name", ["ademamix", "adamw"])
def test_the_last_checkpoint_holds_the_optimizer_and_tensors_only(tmp_path: Path, name: str) -> None:
    spec = segment(end_step=2, optimizer=OptimizerSpec(name=name, lr=1e-2).resolved({}))
    result = train(tmp_path, spec)[0]
    stored = full_weights(tmp_path / "step-2")  # the reader refuses anything but tensors
    assert int(stored["progress.step"]) == 2
    optimizer = {name.removeprefix("optimizer."): value for name, value in stored.items() if name.startswith("optimizer.")}
    assert same(optimizer, result.optimizer)
    assert {int(value) for name, value in optimizer.items() if name.endswith(".step")} == {2}


def test_a_checkpoint_in_the_output_folder_does_not_override_what_was_asked_for(tmp_path: Path) -> None:
    first = train(tmp_path, segment())[0]
    again = train(tmp_path, segment())[0]
    assert again.rows[0]["step"] == 1
    assert losses(again) == losses(first)


@pytest.mark.parametrize("name", ["ademamix", "adamw"])
def test_reading_the_state_of_a_new_optimizer_advances_no_counter(name: str) -> None:
    model = model_config(MODEL, sequence_length=16, attention="sdpa").build()
    model.init_weights()
    optimizers = Optimizers(optimizer_config(OptimizerSpec(name=name, lr=1e-2).resolved({})), model_parts=[model])
    before = full(model.state_dict())
    state = optimizers.state_dict()
    optimizers.load_state_dict(state)
    assert {float(value) for key, value in optimizers.state_dict().items() if key.endswith(".step")} == {0.0}
    assert all(not value.any() for value in optimizers.state_dict().values())
    assert same(full(model.state_dict()), before)


def test_consumed_tokens_are_right_after_a_change_of_the_number_of_processes(tmp_path: Path) -> None:
    train(tmp_path / "two", segment(), processes=2)
    rest = train(tmp_path / "one", segment(), source=at(tmp_path / "two", 3), begin_step=3)[0]
    assert [row["tokens"] for row in rest.rows] == [4 * 64, 5 * 64, 6 * 64]


def test_no_checkpoint_is_deleted_by_the_engine(tmp_path: Path) -> None:
    result = train(tmp_path, segment(end_step=12, checkpoint={"interval": 1, "keep": 1}))[0]
    assert result.committed == list(range(1, 13))
    assert {path.name for path in tmp_path.glob("step-*")} == {f"step-{step}" for step in range(1, 13)}


def test_only_norms_and_xielu_scalars_are_spared_from_weight_decay() -> None:
    import re

    model = model_config(MODEL, sequence_length=16, attention="sdpa").build()
    for name, parameter in model.named_parameters():
        assert (re.search(NOT_DECAYED, name) is not None) == (parameter.ndim == 1), name


def test_weights_without_optimizer_begin_with_empty_moments(tmp_path: Path) -> None:
    parent = train(tmp_path / "parent", segment())[0]
    source = at(tmp_path / "parent", 6, optimizer=False)
    child = train(tmp_path / "child", segment(), source=source, begin_step=0, stop_at=0)[0]
    assert same(child.weights, parent.weights)
    assert not any(value.any() for value in child.optimizer.values())


def test_the_learning_rate_is_that_of_the_tokens_consumed_before_the_step(tmp_path: Path) -> None:
    schedule = Schedule(peak=1e-2, warmup_tokens=128, decay="linear", decay_start=256, decay_tokens=128, final=0.1)
    rows = train(tmp_path, segment(schedule=schedule))[0].rows
    assert [row["lr"] for row in rows] == pytest.approx([0.0, 0.005, 0.01, 0.01, 0.01, 0.0055])


def test_a_checkpoint_of_another_model_or_step_is_refused_with_the_reason(tmp_path: Path) -> None:
    train(tmp_path / "parent", segment())
    with pytest.raises(RuntimeError, match=r"holds step 6, the store says 5"):
        train(tmp_path / "a", segment(), source=Source(str(tmp_path / "parent/step-6"), 5, True), begin_step=5)
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
        reader(str(tmp_path)).read_metadata()
    assert not (tmp_path / "pwned").exists()


@pytest.mark.parametrize("value", [0.1, torch.ones(2, dtype=torch.complex64)])
def test_a_checkpoint_with_anything_but_tensors_of_known_types_is_not_written(tmp_path: Path, value: Any) -> None:
    writer = CheckpointWriter(Store.open(str(tmp_path)), "checkpoint")
    with pytest.raises(TypeError, match=r"'settings.value' is no tensor of a type that checkpoints have \(bfloat16, bool, "), raise_cause():
        dcp.save({"weight": torch.ones(2), "settings": {"value": value}}, storage_writer=writer, no_dist=True)
    assert not list(tmp_path.rglob("*.*"))


# Held-out loss and generation


def direct_loss(weights: dict[str, torch.Tensor], samples: list[Sample]) -> float:
    model = model_config(MODEL, sequence_length=16, attention="sdpa").build()
    model.load_state_dict(weights, strict=False)
    inputs, labels = collate(samples)
    with torch.no_grad():
        logits = model(inputs["input"], inputs["positions"])
    return torch.nn.functional.cross_entropy(logits.double().flatten(0, 1), labels.flatten()).item()


@pytest.mark.parametrize(("processes", "parallel"), [(1, Parallel()), (2, Parallel()), (2, Parallel(cp=2)), (2, Parallel(tp=2))])
def test_held_out_loss_per_source_equals_the_mean_over_its_labels(tmp_path: Path, processes: int, parallel: Parallel) -> None:
    source = SyntheticSamples()
    heldout = {"even": [source[index] for index in range(1000, 1005)], "odd": [source[index] for index in range(2000, 2003)]}
    spec = segment(end_step=3, validation={"interval": 2}, parallel=parallel)
    results = train(tmp_path, spec, processes=processes, heldout=heldout)
    assert list(results[0].heldout) == [2, 3]  # at the interval, and at the end
    for name, samples in heldout.items():
        found = results[-1].heldout[3][name]
        assert found.nats == pytest.approx(direct_loss(results[0].weights, samples), abs=1e-5)
        assert found.tokens == sum(int((sample.labels != -100).sum()) for sample in samples)


def test_validation_changes_nothing_about_the_training(tmp_path: Path) -> None:
    plain = train(tmp_path / "plain", segment())[0]
    source = SyntheticSamples()
    validated = train(tmp_path / "validated", segment(validation={"interval": 1}), heldout={"a": [source[1], source[2], source[3]]})[0]
    assert same(plain.weights, validated.weights)


@pytest.mark.parametrize(("processes", "parallel"), [(1, Parallel()), (2, Parallel(tp=2)), (2, Parallel(cp=2))])
def test_the_next_token_is_the_one_with_the_highest_logit(tmp_path: Path, processes: int, parallel: Parallel) -> None:
    prompt = torch.tensor([[5, 9, 13], [2, 4, 6]])
    expected = model_config(MODEL, sequence_length=16, attention="sdpa", seed=7).build()
    expected.init_weights()
    with torch.no_grad():
        best = expected(prompt)[:, -1].argmax(-1)

    def check(trainer: Any) -> None:
        evaluator = Evaluator(trainer.model_parts[0], trainer.parallel_dims, trainer.device, batch_size=2)
        assert torch.equal(evaluator.next_tokens(prompt), best)

    train(tmp_path, segment(parallel=parallel), processes=processes, stop_at=0, inspect=check)


# What cannot run is refused before anything is built


def test_a_batch_that_the_processes_cannot_divide_is_refused() -> None:
    from apertus_model.trainer.config import micro_batch_size

    with pytest.raises(ValueError, match="global batch of 4 sequences cannot be divided among 3 data-parallel processes"):
        micro_batch_size(segment(), world_size=3)
    with pytest.raises(ValueError, match="3 processes cannot be divided into groups of tp 2 x cp 1 x pp 1"):
        micro_batch_size(segment(parallel=Parallel(tp=2)), world_size=3)


@pytest.mark.parametrize(("requested", "world_size", "used"), [(None, 1, 12), (5, 1, 4), (8, 2, 6), (1, 4, 1), (6, 4, 3)])
def test_the_micro_batch_is_the_largest_that_divides_the_share_of_a_process(requested: int | None, world_size: int, used: int) -> None:
    from apertus_model.trainer.config import micro_batch_size

    assert micro_batch_size(segment(global_batch_size=12, micro_batch_size=requested), world_size=world_size) == used
