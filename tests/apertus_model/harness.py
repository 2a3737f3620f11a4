"""Runs the engine in forked processes: torch and torchtitan are imported once.

Runs use one thread per process, which also keeps OpenMP out of forked children.
"""

import itertools
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
import torch
from torch._dynamo import trace_rules

import apertus_model.trainer.config  # imported here so that the children need not  # noqa: F401
from apertus_model.losses import cross_entropy
from apertus_model.trainer.checkpoint import CheckpointSource, Saved
from apertus_model.trainer.checkpoint_writer import CheckpointWriter
from apertus_model.trainer.config import trainer_config
from apertus_model.trainer.lifecycle import Lifecycle
from infra.store import Store
from specs.anomalies import Event
from specs.capabilities import CHUNK_TOKENS
from specs.model import ModelSpec
from specs.optimizer import OptimizerSpec
from specs.schedule import Schedule
from specs.settings import Precision
from specs.stages import segment_of
from specs.stages.distill import DistillLoss
from specs.stages.domain_weights import WeightUpdate
from specs.stages.dpo import DpoLoss
from specs.stages.qrpo import QrpoLoss
from specs.stages.reward_model import RewardLoss
from specs.stages.training import Segment
from tests.apertus_model.ranks import RUN_SECONDS, in_kept_processes
from tests.apertus_model.trainer.checkpoints import LocalCheckpoint

# The tables of torch's compiler are made here, after all imports; process groups of the children would throw
# them away, in case they had been made before.
trace_rules.get_torch_obj_rule_map()
trace_rules.clear_lru_cache = lambda: None

COMPILED_SECONDS = 560.0  # of a run that compiles

MODEL = ModelSpec(
    dim=32, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=8, ffn_dim=64, vocab_size=128, init_std=0.05
)


class Sample(NamedTuple):
    input: np.ndarray
    labels: np.ndarray
    positions: np.ndarray


class SyntheticSamples:
    """Arithmetic progressions modulo the vocabulary, in two documents, some labels masked: a pure function
    of the index."""

    def __init__(self, length: int = 16, vocab_size: int = 128, masked: bool = True) -> None:
        self.length, self.vocab_size, self.masked = length, vocab_size, masked

    def __getitem__(self, index: int) -> Sample:
        random = np.random.default_rng(index)
        tokens = (
            np.arange(self.length + 1) * random.integers(1, 7) + random.integers(0, 100)
        ) % self.vocab_size
        border = int(random.integers(3, self.length - 3))
        positions = np.arange(self.length)
        positions[border:] -= border
        labels = tokens[1:].copy()
        if self.masked:
            labels[border - 1] = -100
            labels[random.random(self.length) < 0.2 * (index % 3)] = -100
        return Sample(tokens[:-1], labels, positions)


class ListedSamples(SyntheticSamples):
    """The same, and notes every index that was asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[int] = []

    def __getitem__(self, index: int) -> Sample:
        self.asked.append(index)
        return super().__getitem__(index)


class WeightedSample(NamedTuple):
    input: np.ndarray
    labels: np.ndarray
    positions: np.ndarray
    weights: np.ndarray


class WeightedSamples(ListedSamples):
    """The same with a weight per label: 1, or a quarter."""

    def __getitem__(self, index: int) -> Any:
        weights = np.where(np.random.default_rng(index).random(self.length) < 0.4, 1, 0.25).astype(np.float32)
        return WeightedSample(*super().__getitem__(index), weights)


class PreferenceRow(NamedTuple):
    input: np.ndarray
    labels: np.ndarray
    positions: np.ndarray
    segments: np.ndarray
    rewards: np.ndarray
    reference: np.ndarray
    present: np.ndarray


class PreferenceRows(ListedSamples):
    """Rows of one or two pairs, with room for four sequences; each sequence is a prompt of two tokens and
    a completion of two to six (of one to two where there are two pairs). Reference log-probabilities are
    random, or those given by row."""

    def __init__(self, length: int = 16, reference: np.ndarray | None = None, rows: int = 1 << 40) -> None:
        super().__init__()
        self.length, self.reference, self.rows = length, reference, rows

    def __getitem__(self, index: int) -> Any:
        self.asked.append(index)
        return self.row(index % self.rows)

    def row(self, index: int) -> PreferenceRow:
        random = np.random.default_rng(index)
        pairs = 1 + index % 2
        lengths = random.integers(2, self.length // (2 * pairs) - 1, 2 * pairs)
        tokens, positions = random.integers(0, 128, self.length), np.arange(self.length)
        labels, segments = np.full(self.length, -100), np.full(self.length, -1)
        begin = 0
        for segment, length in enumerate(lengths):
            # the last token of a completion is a label, and no input that matters
            end = begin + 2 + length - 1
            positions[begin:] = np.arange(self.length - begin)
            labels[begin + 1 : end] = random.integers(0, 128, end - begin - 1)
            segments[begin + 1 : end] = segment
            begin = end
        positions[begin:] = np.arange(self.length - begin)
        present = np.arange(4) < 2 * pairs
        rewards = (random.random(4) * present).astype(np.float32)
        reference = (
            random.normal(-10, 1, 4).astype(np.float32) * present
            if self.reference is None
            else self.reference[index]
        )
        return PreferenceRow(
            tokens, labels, positions, segments, rewards, reference.astype(np.float32), present
        )


class RewardRow(NamedTuple):
    input: np.ndarray
    labels: np.ndarray
    positions: np.ndarray
    segments: np.ndarray
    margins: np.ndarray
    present: np.ndarray


class RewardRows(PreferenceRows):
    """The same rows, each sequence with a reward at its last place, and a margin for each pair."""

    def row(self, index: int) -> Any:
        row = super().row(index)
        places = [np.flatnonzero(row.segments == number) for number in range(2 * (1 + index % 2))]
        ends = np.array([place[-1] for place in places])
        labels, segments = np.full(self.length, -100), np.full(self.length, -1)
        labels[ends], segments[ends] = row.input[ends], np.arange(ends.size)
        present = row.present[::2]
        margins = (np.random.default_rng(index).random(2) * present).astype(np.float32)
        return RewardRow(row.input, labels, row.positions, segments, margins, present)


def segment(kind: str = "pretrain", **changes: Any) -> Any:
    """A segment of a few tiny steps."""
    fields: dict[str, Any] = {
        "model": MODEL,
        "seed": 7,
        "sequence_length": 16,
        "global_batch_size": 4,
        "optimizer": OptimizerSpec(
            lr=1e-2, alpha_warmup=10, beta3_warmup=10, betas=(0.9, 0.99, 0.999)
        ).resolved({}),
        "schedule": Schedule(warmup_tokens=256),
        "precision": Precision(param="float32"),
        "end_step": 6,
        "checkpoint": {"interval": 3},
    }
    further: dict[str, Any] = {
        "sft": {"repeats": [1]},
        "qrpo": {"loss": QrpoLoss()},
        "dpo": {"loss": DpoLoss()},
        "reward_model": {"loss": RewardLoss(), "model": MODEL.model_copy(update={"head": "reward"})},
        "distill": {"loss": DistillLoss(), "teacher": MODEL},
        "domain_weights": {"sources": 2, "update": WeightUpdate()},
    }.get(kind, {})
    return segment_of(kind)(**{**fields, **further, **changes})


@dataclass
class Result:
    """What a rank has after a run: metric rows (rank 0), final weights and, where `states` asked for it,
    optimizer state in full, samples it read."""

    rows: list[dict[str, Any]] = field(default_factory=list)
    weights: dict[str, torch.Tensor] = field(default_factory=dict)
    optimizer: Any = None  # tensors by name
    learning_rates: list[float] = field(default_factory=list)
    weight_decays: list[float] = field(default_factory=list)
    asked: list[int] = field(default_factory=list)
    committed: list[int] = field(default_factory=list)
    heldout: dict[int, Any] = field(default_factory=dict)
    norms: dict[int, dict[str, float]] = field(default_factory=dict)
    events: list[Event] = field(default_factory=list)
    saved: dict[int, Saved] = field(default_factory=dict)
    facts: dict[int, dict[str, Any]] = field(default_factory=dict)
    objective: dict[int, dict[str, Any]] = field(default_factory=dict)
    finished: bool = True


@dataclass
class Data:
    """The data of a run."""

    samples: Any
    heldout: dict[str, list[Any]] = field(default_factory=dict)


class Recorder:
    """Keeps what a run reports."""

    def __init__(self, result: Result) -> None:
        self.add_step = result.rows.append
        self.add_heldout = result.heldout.__setitem__
        self.add_norms = result.norms.__setitem__
        self.add_anomaly = result.events.append


class FolderStorage:
    """Checkpoints in folders `step-N`, which no marker names."""

    def __init__(self, folder: Path, result: Result, storage: Callable[[str], Store] = Store.open) -> None:
        self._folder, self._result, self._storage = folder, result, storage

    def writer(self, step: int) -> CheckpointWriter:
        return CheckpointWriter(self._storage(str(self._folder)), f"step-{step}")

    def prepare_commit(self, step: int, anomalies: Any, objective: Any) -> Callable[[Saved], None]:
        def commit(saved: Saved) -> None:
            self._result.committed.append(step)
            self._result.saved[step] = saved
            self._result.facts[step] = anomalies
            self._result.objective[step] = objective

        return commit

    def committed(self, step: int) -> LocalCheckpoint:
        return LocalCheckpoint(self._folder / f"step-{step}")

    timed = staticmethod(nullcontext)


def train(
    folder: Path,
    spec: Segment,
    *,
    processes: int = 1,
    source: CheckpointSource | None = None,
    begin_step: int | None = None,
    stop_at: int | None = None,
    heldout: dict[str, list[Sample]] | None = None,
    inspect: Callable[[Any], Any] | None = None,
    data: Callable[[], ListedSamples] = ListedSamples,
    states: bool = False,
    anomalies: dict[str, Any] | None = None,
    objective: dict[str, Any] | None = None,
    clock: Callable[[], float] | None = None,
    storage: Callable[[str], Store] = Store.open,
    teacher: LocalCheckpoint | None = None,
    chunk_tokens: int = CHUNK_TOKENS,
    fsdp: bool = False,
) -> list[Result]:
    """Run a segment, with checkpoints in `folder/step-N`; the results by rank. `stop_at`: rank 1 (or 0) is
    asked to stop there. `chunk_tokens`: of cross-entropy. `fsdp`: also around one process."""

    def run(rank: int) -> Result:
        samples = data()
        result = Result()
        steps = itertools.count()

        def stop() -> bool:  # asked before each step
            return stop_at is not None and rank == processes - 1 and next(steps) >= stop_at

        lifecycle = Lifecycle(
            begin_step=begin_step if begin_step is not None else spec.start_step,
            source=source,
            storage=FolderStorage(folder, result, storage),
            stop_requested=stop,
            scratch=str(folder),
            anomalies=anomalies or {},
            objective=objective or {},
            clock=clock or time.monotonic,
            checkpoint_of={"teacher": teacher}.get,
        )
        config = trainer_config(
            spec, Data(samples, heldout or {}), Recorder(result), lifecycle, world_size=processes
        )
        always = patch("apertus_model.model.parallelize.needs_fsdp", lambda *_: True)
        with always if fsdp else nullcontext():
            trainer = config.build()
        cross_entropy.CHUNK_TOKENS = chunk_tokens
        try:
            result.finished = trainer.train()
            for part in trainer.model_parts:
                result.weights |= full(part.state_dict())
            if states:
                result.optimizer = full(trainer.optimizers.state_dict())
            groups = [group for optimizer in trainer.optimizers for group in optimizer.param_groups]
            result.learning_rates = [group["lr"] for group in groups]
            result.weight_decays = [group["weight_decay"] for group in groups]
            result.asked = sorted(samples.asked)  # several threads ask
            if inspect is not None:
                inspect(trainer)
        finally:
            cross_entropy.CHUNK_TOKENS = CHUNK_TOKENS
            trainer.close()  # waits for the last checkpoint
        return result

    return in_kept_processes(folder, run, processes, COMPILED_SECONDS if spec.compile else RUN_SECONDS)


def full(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {
        name: (value.full_tensor() if hasattr(value, "full_tensor") else value).detach().to("cpu", copy=True)
        for name, value in state.items()
    }


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    """Equal names and equal bits."""
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def difference(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    """Largest absolute difference over all tensors."""
    assert a.keys() == b.keys()
    return max((a[name].float() - b[name].float()).abs().max().item() for name in a)


def losses(result: Result) -> list[float]:
    return [row["loss"] for row in result.rows]
