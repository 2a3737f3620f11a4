"""Every layout trains as one process does: same start, same losses, same weights, same held-out loss, from
and to the same checkpoints.

gloo processes on one machine. The wide matrix is slow; `docs/parallelism.md` has its last results."""

from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from apertus_model.data.goldfish import goldfish_mask
from apertus_model.model.attention_choice import Choice
from apertus_model.model.model import model_config, rope_config
from apertus_model.trainer.checkpoint import Source
from apertus_model.trainer.evaluator import Evaluator
from apertus_model.trainer.loader import collate
from specs.launch import Parallel
from specs.stages.sft import Lora
from tests.apertus_model.harness import (
    MODEL,
    ListedSamples,
    Result,
    Sample,
    difference,
    losses,
    same,
    segment,
    train,
)
from tests.apertus_model.step_memory import local
from tests.machine import compiles, slow
from tests.numerics import Numerics

DEEP = MODEL.model_copy(update={"n_layers": 6})
STEPS = 4


class PackedSamples(ListedSamples):
    """One to nine documents in a row, some of one token; a quarter of the labels is left out by Goldfish,
    and those at borders are."""

    def __init__(self, length: int = 32) -> None:
        super().__init__()
        self.length = length

    def __getitem__(self, index: int) -> Any:
        self.asked.append(index)
        random = np.random.default_rng(index)
        tokens = (
            np.arange(self.length + 1) * random.integers(1, 7) + random.integers(0, 100)
        ) % self.vocab_size
        begins = np.unique([0, *random.integers(1, self.length, index % 9)])
        positions = (
            np.arange(self.length) - begins[np.searchsorted(begins, np.arange(self.length), side="right") - 1]
        )
        labels = np.where(goldfish_mask(tokens[1:], k=4, h=5), tokens[1:], -100)
        labels[begins[1:] - 1] = -100
        return Sample(tokens[:-1], labels, positions)


HELDOUT = {"a": [PackedSamples()[index] for index in range(1000, 1005)]}  # a last batch that is not full


def spec_of(kind: str = "pretrain", **changes: Any) -> Any:
    fields = {
        "model": DEEP,
        "sequence_length": 32,
        "global_batch_size": 8,
        "end_step": STEPS,
        "validation": {"interval": 2},
    }
    return segment(kind, **{**fields, **changes})


def run(folder: Path, spec: Any, processes: int = 1, **arguments: Any) -> Result:
    """What rank 0 reports, with the weights and optimizer states of all stages of a pipeline."""
    results = train(folder, spec, processes=processes, data=PackedSamples, heldout=HELDOUT, **arguments)
    for result in results[1:]:
        assert result.heldout == results[0].heldout
        results[0].weights |= result.weights
        results[0].optimizer |= result.optimizer
    return results[0]


def at(folder: Path, step: int = 2) -> Source:
    return Source(str(folder / f"step-{step}"), step, optimizer=True)


@dataclass
class Differences:
    """Largest ones over all steps: loss and held-out loss in nats, gradient norm relative, weights
    absolute."""

    loss: float
    heldout: float
    grad_norm: float
    weights: float

    @classmethod
    def between(cls, result: Result, reference: Result) -> "Differences":
        norms = [
            (row["grad_norm"], expected["grad_norm"])
            for row, expected in zip(result.rows, reference.rows, strict=True)
        ]
        assert [row["masked_share"] for row in result.rows] == [row["masked_share"] for row in reference.rows]
        assert {step: found["a"].tokens for step, found in result.heldout.items()} == {
            2: HELDOUT_LABELS,
            STEPS: HELDOUT_LABELS,
        }
        return cls(
            max(abs(a - b) for a, b in zip(losses(result), losses(reference), strict=True)),
            max(
                abs(result.heldout[step]["a"].nats - reference.heldout[step]["a"].nats)
                for step in reference.heldout
            ),
            max(abs(a - b) / b for a, b in norms),
            difference(result.weights, reference.weights),
        )


HELDOUT_LABELS = sum(int((sample.labels != -100).sum()) for sample in HELDOUT["a"])
INTERLEAVED = {"pp": 2, "pp_schedule": "interleaved-1f1b"}
LAYOUTS: dict[str, tuple[int, Parallel]] = {
    "FSDP": (2, Parallel()),
    "HSDP": (4, Parallel(dp_replicate=2, dp_shard=2)),
    "TP with SP": (2, Parallel(tp=2, sequence_parallel=True)),
    "CP": (2, Parallel(cp=2)),
    "CP head-tail": (2, Parallel(cp=2, cp_load_balancer="head-tail")),
    "PP": (2, Parallel(pp=2)),
    "PP interleaved": (2, Parallel(**INTERLEAVED)),
    "PP x FSDP": (4, Parallel(pp=2)),
}
FURTHER: dict[str, tuple[int, Parallel]] = {
    "DDP": (2, Parallel(dp_replicate=2)),
    "FSDP 4": (4, Parallel()),
    "TP": (2, Parallel(tp=2)),
    "CP 4": (4, Parallel(cp=4)),
    "CP 4 head-tail": (4, Parallel(cp=4, cp_load_balancer="head-tail")),
    "FSDP x TP": (4, Parallel(tp=2)),
    "FSDP x TP with SP": (4, Parallel(tp=2, sequence_parallel=True)),
    "DDP x TP with SP": (4, Parallel(dp_replicate=2, tp=2, sequence_parallel=True)),
    "FSDP x CP": (4, Parallel(cp=2)),
    "DDP x CP": (4, Parallel(dp_replicate=2, cp=2)),
    "TP x CP": (4, Parallel(tp=2, cp=2)),
    "TP x CP with SP": (4, Parallel(tp=2, cp=2, sequence_parallel=True)),
    "PP gpipe": (2, Parallel(pp=2, pp_schedule="gpipe")),
    "PP 4": (4, Parallel(pp=4)),
    "PP x DDP": (4, Parallel(pp=2, dp_replicate=2)),
    "PP gpipe x FSDP": (4, Parallel(pp=2, pp_schedule="gpipe")),
    "PP interleaved x FSDP": (4, Parallel(**INTERLEAVED)),
    "PP x TP": (4, Parallel(pp=2, tp=2)),
    "PP x TP with SP": (4, Parallel(pp=2, tp=2, sequence_parallel=True)),
    "PP interleaved x TP": (4, Parallel(**INTERLEAVED, tp=2)),
    "PP x CP": (4, Parallel(pp=2, cp=2)),
    "PP x CP head-tail": (4, Parallel(pp=2, cp=2, cp_load_balancer="head-tail")),
}
ALL = LAYOUTS | FURTHER


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Result]:
    """One process that takes the whole batch at once."""
    folder = tmp_path_factory.mktemp("alone")
    return folder, run(folder, spec_of(checkpoint={"interval": 2}))


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


@pytest.mark.parametrize("name", ["HSDP", "TP with SP", "CP", "PP x FSDP"])
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


def test_a_pipeline_goes_on_from_its_checkpoint_with_the_same_bits_and_so_does_one_process(
    tmp_path: Path, alone: tuple[Path, Result]
) -> None:
    spec = spec_of(parallel=Parallel(pp=2), checkpoint={"interval": 2})
    whole = run(tmp_path / "whole", spec, 2)
    rest = run(tmp_path / "rest", spec, 2, source=at(tmp_path / "whole"), begin_step=2)
    assert same(rest.weights, whole.weights)
    assert same(rest.optimizer, whole.optimizer)
    folder, reference = alone
    back = run(tmp_path / "back", spec_of(), source=at(tmp_path / "whole"), begin_step=2)
    there = run(
        tmp_path / "there", spec_of(parallel=Parallel(**INTERLEAVED)), 2, source=at(folder), begin_step=2
    )
    for result in (back, there):
        assert losses(result) == pytest.approx(losses(reference)[2:], abs=2e-6)
        assert difference(result.weights, reference.weights) < 1e-5
        assert difference(result.optimizer, reference.optimizer) < 1e-6


ADAPTED = Lora(rank=3, alpha=6.0, targets=["wq", "wv", "wo", "up_proj", "down_proj"])


@pytest.mark.parametrize("schedule", [slow("1f1b"), "interleaved-1f1b"])
def test_adapters_train_alike_in_a_pipeline_and_their_sum_is_read_there(
    tmp_path: Path, alone: tuple[Path, Result], schedule: Any
) -> None:
    parallel = Parallel(pp=2, pp_schedule=schedule)
    begin: dict[str, Any] = {
        "source": Source(str(alone[0] / "step-2"), 2, optimizer=False, new_adapters=True),
        "begin_step": 0,
    }
    one = run(tmp_path / "one", spec_of("sft", lora=ADAPTED), **begin)
    two = run(tmp_path / "two", spec_of("sft", lora=ADAPTED, parallel=parallel), 2, **begin)
    assert losses(two) == pytest.approx(losses(one), abs=2e-6)
    # B is near 0, where AdEMAMix divides small numbers by small numbers
    assert difference(two.weights, one.weights) < 1e-4
    begin["source"] = Source(
        str(tmp_path / "two" / f"step-{STEPS}"), STEPS, optimizer=False, new_adapters=True
    )
    merged = run(tmp_path / "merged", spec_of(), **begin, stop_at=0)
    spread = run(tmp_path / "spread", spec_of(parallel=parallel), 2, **begin, stop_at=0)
    assert same(spread.weights, merged.weights)


# Documents, recomputation, compilation


@pytest.mark.parametrize(
    "parallel",
    [
        Parallel(cp=2),
        Parallel(cp=2, cp_load_balancer="head-tail"),
        Parallel(tp=2, sequence_parallel=True),
    ],
)
def test_changing_a_document_never_changes_the_logits_of_its_neighbours_on_other_ranks(
    tmp_path: Path, parallel: Parallel
) -> None:
    tokens = torch.randint(0, 128, (1, 32), generator=torch.Generator().manual_seed(0))
    borders = [0, 1, 7, 20, 30, 32]  # the border between the ranks lies inside of the third document
    positions = torch.cat([torch.arange(end - begin) for begin, end in pairwise(borders)])[None]

    def check_logits(trainer: Any) -> None:
        evaluator = Evaluator(trainer.model_parts[0], trainer.parallel_dims, trainer.device, batch_size=1)
        place = torch.arange(32)[None]

        def logits(tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            with torch.no_grad():
                # what stands where labels do is split like them
                found, places, _ = evaluator._forward(tokens, positions, place)
            return (found.full_tensor() if hasattr(found, "full_tensor") else found), places

        before, places = logits(tokens)
        for begin, end in pairwise(borders):
            other = tokens.clone()
            other[:, begin:end] = (tokens[:, begin:end] + 1) % 128
            after, _ = logits(other)
            inside = (places >= begin) & (places < end)
            assert torch.equal(after[~inside], before[~inside])
            assert not inside.any() or not torch.equal(after[inside], before[inside])

    run(tmp_path, spec_of(parallel=parallel), 2, stop_at=0, inspect=check_logits)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["CP", "CP head-tail", "TP with SP", "PP", "PP x CP"])
def test_flex_attention_sees_the_same_documents_in_every_layout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Forwards only, which is all that FlexAttention can do on a CPU, where a recipe cannot choose it."""
    samples = [PackedSamples(256)[index] for index in range(3)]
    model = model_config(DEEP, sequence_length=256, attention="sdpa", seed=7).build()
    model.init_weights()
    inputs, labels = collate(samples)
    with torch.no_grad():
        expected = torch.nn.functional.cross_entropy(
            model(inputs["input"], inputs["positions"]).flatten(0, 1), labels.flatten()
        ).item()
    attention = "torchtitan.models.common.attention"
    monkeypatch.setattr("apertus_model.trainer.config.attention_of", lambda segment: Choice("flex", ""))
    monkeypatch.setattr(f"{attention}.FlexAttention._compiled_flex_attn", staticmethod(flex_attention))
    monkeypatch.setattr(f"{attention}._compiled_create_block_mask", create_block_mask)

    def check_loss(trainer: Any) -> None:
        assert trainer.heldout_losses()["long"].nats == pytest.approx(expected, abs=2e-6)

    processes, parallel = ALL[name]
    spec = spec_of(parallel=parallel, sequence_length=256, global_batch_size=4)
    train(
        tmp_path,
        spec,
        processes=processes,
        data=PackedSamples,
        heldout={"long": samples},
        stop_at=0,
        inspect=check_loss,
    )


@pytest.mark.parametrize(
    ("name", "other"),
    [
        ("FSDP", "never"),
        pytest.param("HSDP", "never", marks=pytest.mark.slow),
        pytest.param("PP x FSDP", "always", marks=pytest.mark.slow),
    ],
)
def test_what_happens_to_gathered_weights_changes_no_bit(tmp_path: Path, name: str, other: Any) -> None:
    processes, parallel = ALL[name]
    changed = parallel.model_copy(update={"reshard_after_forward": other})
    results = [
        run(tmp_path / str(index), spec_of(parallel=layout, end_step=2), processes)
        for index, layout in enumerate((parallel, changed))
    ]
    assert losses(results[1]) == losses(results[0])
    assert same(results[1].weights, results[0].weights)
    assert same(results[1].optimizer, results[0].optimizer)


@pytest.mark.parametrize("micro_batch_size", [1, slow(2)])  # as stages and more; fewer
def test_more_stages_in_a_process_train_alike(tmp_path: Path, micro_batch_size: int) -> None:
    deeper = MODEL.model_copy(update={"n_layers": 10})
    default, three = (
        run(
            tmp_path / str(stages),
            spec_of(
                model=deeper,
                end_step=2,
                micro_batch_size=micro_batch_size,
                parallel=Parallel(**INTERLEAVED, virtual_stages=stages),
            ),
            2,
        )
        for stages in (None, 3)
    )
    assert losses(three) == losses(default)  # norms of the gradients are added up in another order
    assert difference(three.weights, default.weights) < 1e-6
    assert difference(three.optimizer, default.optimizer) < 1e-6


@pytest.mark.parametrize("kind", ["full", "selective"])
@pytest.mark.parametrize(
    "name",
    [None, *(pytest.param(name, marks=pytest.mark.slow) for name in ("FSDP", "TP with SP", "CP", "PP"))],
)
def test_recomputation_changes_no_bit(tmp_path: Path, name: str | None, kind: str) -> None:
    processes, parallel = ALL[name] if name else (1, Parallel())
    kept = run(tmp_path / "kept", spec_of(parallel=parallel, end_step=2), processes)
    recomputed = run(
        tmp_path / "recomputed",
        spec_of(parallel=parallel, end_step=2, activation_checkpointing=kind),
        processes,
    )
    assert losses(recomputed) == losses(kept)
    assert same(recomputed.weights, kept.weights)
    assert same(recomputed.optimizer, kept.optimizer)


@compiles
@pytest.mark.slow
@pytest.mark.parametrize("name", [None, "TP with SP"])
def test_a_memory_budget_recomputes_without_a_change_of_the_losses(
    tmp_path: Path, alone: tuple[Path, Result], monkeypatch: pytest.MonkeyPatch, name: str | None
) -> None:
    monkeypatch.setattr("tests.apertus_model.harness.RUN_SECONDS", 280)
    processes, parallel = ALL[name] if name else (1, Parallel())
    spec = spec_of(
        parallel=parallel, compile=True, activation_checkpointing="memory_budget", memory_budget=0.0
    )
    found = Differences.between(run(tmp_path, spec, processes), alone[1])
    assert found.loss < 2e-6, found
    assert found.weights < 1e-5, found


@compiles
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "recomputation"),
    [
        ("TP with SP", "none"),
        *((name, kind) for name in (None, "FSDP", "CP", "PP") for kind in ("none", "full")),
    ],
)
def test_compiled_layers_give_the_same_losses(
    tmp_path: Path,
    alone: tuple[Path, Result],
    monkeypatch: pytest.MonkeyPatch,
    name: str | None,
    recomputation: str,
) -> None:
    monkeypatch.setattr("tests.apertus_model.harness.RUN_SECONDS", 280)
    processes, parallel = ALL[name] if name else (1, Parallel())
    spec = spec_of(parallel=parallel, compile=True, activation_checkpointing=recomputation)
    found = Differences.between(run(tmp_path, spec, processes), alone[1])
    print(name, found)
    assert found.loss < 2e-6, found
    assert found.heldout < 2e-6, found
    assert found.weights < 1e-5, found
