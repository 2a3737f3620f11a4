"""Every layout trains as one process does: same start, same losses, same weights, same held-out loss, from
and to the same checkpoints.

gloo processes on one machine. The wide matrix is slow; `docs/parallelism.md` has its last results."""

from pathlib import Path
from typing import Any

import pytest
import torch

from apertus_model.model.model import model_config
from apertus_model.model.rotation import rope_config
from apertus_model.trainer.checkpoint import CheckpointSource
from specs.launch import Parallel
from specs.settings import Lora
from tests.apertus_model.harness import (
    Result,
    difference,
    losses,
    same,
)
from tests.apertus_model.step_costs import local
from tests.apertus_model.trainer.checkpoints import LocalCheckpoint
from tests.apertus_model.trainer.layouts import (
    ALL,
    DEEP,
    INTERLEAVED,
    STEPS,
    Differences,
    at,
    run,
    spec_of,
)
from tests.machine import slow
from tests.numerics import Numerics


def check(folder: Path, name: str, reference: Result, numerics: Numerics, **changes: Any) -> Differences:
    processes, parallel = ALL[name]
    result = run(folder, spec_of(parallel=parallel, **changes), processes)
    found = Differences.between(result, reference)
    against = (
        "one process that takes the whole batch; FSDP, HSDP, TP, SP, CP, PP and combinations"
        " (docs/parallelism.md)"
    )
    for quantity, seen, allowed in (
        ("loss of each of 4 steps, in nats", found.loss, 2e-6),
        ("held-out loss, in nats", found.heldout, 2e-6),
        ("norm of the gradients before clipping, relative", found.grad_norm, 1e-5),
        ("weights after 4 steps of AdEMAMix", found.weights, 1e-5),
    ):
        numerics(
            "parallelism",
            quantity,
            source="test_layouts.py",
            against=against,
            difference=seen,
            allowed=allowed,
        )
    return found


@pytest.mark.parametrize("name", [slow("HSDP"), "TP with SP", "CP", "PP x FSDP"])
def test_a_layout_gives_the_losses_and_the_weights_of_one_process(
    tmp_path: Path, alone: tuple[Path, Result], name: str, numerics: Numerics
) -> None:
    reference = alone[1]
    # clipping is at work, over all stages
    assert all(row["grad_norm"] > spec_of().optimizer.grad_clip for row in reference.rows)
    check(tmp_path, name, reference, numerics, micro_batch_size=2)


@pytest.mark.slow
@pytest.mark.parametrize("micro_batch_size", [None, 1])
@pytest.mark.parametrize("name", ALL)
def test_every_layout_gives_the_losses_and_the_weights_of_one_process(
    tmp_path: Path, alone: tuple[Path, Result], name: str, micro_batch_size: int | None, numerics: Numerics
) -> None:
    print(name, check(tmp_path, name, alone[1], numerics, micro_batch_size=micro_batch_size))


@pytest.mark.parametrize("name", [slow("HSDP"), "TP with SP", "CP", "PP interleaved"])
def test_every_layout_starts_from_the_same_weights_and_positions(tmp_path: Path, name: str) -> None:
    def one_table_a_part(trainer: Any) -> None:
        for part in trainer.model_parts:
            tables = {id(layer.attention.rope.cache): layer.attention.rope for layer in part.layers.values()}
            (rope,) = tables.values()
            expected = rope_config(DEEP, 32).build().cache
            assert torch.equal(local(rope.cache), expected)

    processes, parallel = ALL[name]
    start = run(tmp_path, spec_of(parallel=parallel), processes, stop_at=0, inspect=one_table_a_part)
    expected = model_config(DEEP, sequence_length=32, attention="sdpa", seed=7).build()
    expected.init_weights()
    assert same(start.weights, dict(expected.state_dict()))


# Pipelines: checkpoints, adapters, what is refused


def test_a_pipeline_and_one_process_resume_from_a_checkpoint_of_a_pipeline(
    tmp_path: Path, alone: tuple[Path, Result]
) -> None:
    spec = spec_of(parallel=Parallel(pp=2), checkpoint={"interval": 2})
    whole = run(tmp_path / "whole", spec, 2, states=True)
    middle = {"source": at(tmp_path / "whole"), "begin_step": 2, "states": True}
    rest = run(tmp_path / "rest", spec, 2, **middle)
    assert same(rest.weights, whole.weights)
    assert same(rest.optimizer, whole.optimizer)
    folder, reference = alone
    back = run(tmp_path / "back", spec_of(), **middle)
    interleaved = spec_of(parallel=Parallel(**INTERLEAVED))
    there = run(tmp_path / "there", interleaved, 2, **{**middle, "source": at(folder)})
    for result in (back, there):
        assert losses(result) == pytest.approx(losses(reference)[2:], abs=2e-6)
        assert difference(result.weights, reference.weights) < 1e-5
        assert difference(result.optimizer, reference.optimizer) < 1e-6


ADAPTED = Lora(rank=3, alpha=6.0, targets=["wq", "wv", "wo", "up_proj", "down_proj"])


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["1f1b", "interleaved-1f1b"])
def test_adapters_train_alike_in_a_pipeline_and_their_sum_is_read_there(
    tmp_path: Path, alone: tuple[Path, Result], schedule: Any
) -> None:
    parallel = Parallel(pp=2, pp_schedule=schedule)
    begin: dict[str, Any] = {
        "source": CheckpointSource(
            LocalCheckpoint(alone[0] / "step-2"), 2, optimizer=False, new_adapters=True
        ),
        "begin_step": 0,
    }
    one = run(tmp_path / "one", spec_of("sft", lora=ADAPTED), **begin)
    two = run(tmp_path / "two", spec_of("sft", lora=ADAPTED, parallel=parallel), 2, **begin)
    assert losses(two) == pytest.approx(losses(one), abs=2e-6)
    # B is near 0, where AdEMAMix divides small numbers by small numbers
    assert difference(two.weights, one.weights) < 1e-4
    begin["source"] = CheckpointSource(
        LocalCheckpoint(tmp_path / "two" / f"step-{STEPS}"), STEPS, optimizer=False, new_adapters=True
    )
    merged = run(tmp_path / "merged", spec_of(), **begin, stop_at=0)
    spread = run(tmp_path / "spread", spec_of(parallel=parallel), 2, **begin, stop_at=0)
    assert same(spread.weights, merged.weights)


@pytest.mark.slow
def test_a_model_like_llama_trains_alike_on_ranks_that_share_its_heads(tmp_path: Path) -> None:
    model = spec_of().model.model_copy(update={"activation": "swiglu", "qk_norm": False})
    reference = run(tmp_path / "alone", spec_of(model=model), 1)
    processes, parallel = ALL["TP with SP"]
    found = Differences.between(
        run(tmp_path / "shared", spec_of(model=model, parallel=parallel), processes), reference
    )
    assert found.loss < 2e-6 and found.grad_norm < 1e-5 and found.weights < 1e-5
