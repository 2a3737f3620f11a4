"""Layouts of a small model, trained in processes of gloo on packed documents."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from apertus_model.data.tokens.goldfish import goldfish_mask
from apertus_model.trainer.checkpoint import CheckpointSource
from specs.launch import Parallel
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
from tests.apertus_model.trainer.checkpoints import LocalCheckpoint

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
        if result.optimizer is not None:
            results[0].optimizer |= result.optimizer
    return results[0]


def assert_recomputation_changes_no_bit(
    folder: Path, spec: Any, kind: str, processes: int = 1, kept: Result | None = None
) -> None:
    """`kept`: what a run without recomputation has given; None makes one."""
    kept = kept or run(folder / "kept", spec, processes, states=True)
    recomputed = spec.model_copy(update={"activation_checkpointing": kind})
    found = run(folder / "recomputed", recomputed, processes, states=True)
    assert losses(found) == losses(kept)
    assert same(found.weights, kept.weights) and same(found.optimizer, kept.optimizer)


def assert_compiled_layers_train_alike(
    folder: Path, spec: Any, alone: Result, *, weights: float = 1e-5
) -> None:
    """`alone`: the same run, not compiled. `weights`: their largest difference; the first steps of AdEMAMix
    enlarge what another order of sums rounds."""
    found = run(folder, spec.model_copy(update={"compile": True}))
    assert losses(found) == pytest.approx(losses(alone), abs=2e-6)
    assert difference(found.weights, alone.weights) < weights


def at(folder: Path, step: int = 2) -> CheckpointSource:
    return CheckpointSource(LocalCheckpoint(folder / f"step-{step}"), step, optimizer=True)


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
