"""What is computed without training: reference log-probabilities, loss by position, divergence. One truth:
the model called directly."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import apertus_model.losses.preference
from apertus_model.model.model import model_config
from apertus_model.trainer.checkpoint import CheckpointSource, load_tensors
from apertus_model.trainer.evaluator import Evaluator
from apertus_model.trainer.inference import load_evaluator
from specs.launch import Parallel
from tests.apertus_model.harness import MODEL, PreferenceRows, SyntheticSamples, segment, train
from tests.apertus_model.ranks import in_kept_processes
from tests.apertus_model.trainer.checkpoints import LocalCheckpoint
from tests.machine import slow

LAYOUTS = [(1, Parallel()), slow(2, Parallel()), slow(2, Parallel(cp=2)), (2, Parallel(tp=2))]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A training of three steps, with checkpoints of each."""
    folder = tmp_path_factory.mktemp("trained")
    train(folder, segment(end_step=3, checkpoint={"interval": 1}))
    return folder


def on_ranks(
    folder: Path,
    checkpoints: Path,
    processes: int,
    parallel: Parallel,
    work: Callable[[Callable[..., Evaluator]], Any],
) -> list[Any]:
    """`work(load)` on every rank; `load(step, dtype=..., batch_size=...)` opens a checkpoint."""

    def run(rank: int) -> Any:
        def load(step: int, dtype: Any = "float32", batch_size: int = 2) -> Evaluator:
            return load_evaluator(
                MODEL, LocalCheckpoint(checkpoints / f"step-{step}"), sequence_length=16, attention="sdpa",
                parallel=parallel,
                batch_size=batch_size, scratch=str(folder), dtype=dtype,
            )  # fmt: skip

        return work(load)

    return in_kept_processes(folder / "ranks", run, processes)


def log_softmax(checkpoints: Path, step: int, samples: list[Any]) -> torch.Tensor:
    """ln p over the vocabulary at every place of the samples, float64."""
    model = model_config(MODEL, sequence_length=16, attention="sdpa").build()
    state = dict(model.state_dict())
    load_tensors(state, LocalCheckpoint(checkpoints / f"step-{step}"))
    model.load_state_dict(state)
    tokens, positions = (
        torch.from_numpy(np.stack([getattr(sample, name) for sample in samples]))
        for name in ("input", "positions")
    )
    with torch.no_grad():
        return model(tokens, positions).double().log_softmax(-1)


@pytest.mark.parametrize(("processes", "parallel"), LAYOUTS)
def test_a_sequence_has_the_log_probability_of_its_completion(
    tmp_path: Path, checkpoints: Path, processes: int, parallel: Parallel
) -> None:
    rows = [PreferenceRows().row(index) for index in range(5)]
    results = on_ranks(tmp_path, checkpoints, processes, parallel, lambda load: load(3).of_sequences(rows, 4))
    log_p = log_softmax(checkpoints, 3, rows)
    expected = np.zeros((5, 4))
    for index, row in enumerate(rows):
        for place in np.flatnonzero(row.segments >= 0):
            expected[index, row.segments[place]] += log_p[index, place, row.labels[place]].item()
    for found in results:
        assert found.dtype == torch.float32
        np.testing.assert_allclose(found.numpy(), expected, rtol=2e-6)


ZERO = [
    slow(1, Parallel(), "float32", 2),
    (1, Parallel(), "bfloat16", 2),
    slow(2, Parallel(), "float32", 1),
    (2, Parallel(), "bfloat16", 2),
    slow(2, Parallel(cp=2), "float32", 2),
    (2, Parallel(cp=2, cp_load_balancer="head-tail"), "float32", 2),
    (2, Parallel(tp=2), "bfloat16", 2),
]


@pytest.mark.parametrize(("processes", "parallel", "dtype", "micro_batch_size"), ZERO)
def test_the_first_log_ratio_of_every_sequence_is_exactly_zero(
    tmp_path: Path,
    checkpoints: Path,
    monkeypatch: pytest.MonkeyPatch,
    processes: int,
    parallel: Parallel,
    dtype: str,
    micro_batch_size: int,
) -> None:
    rows = PreferenceRows()
    stored = [rows.row(index) for index in range(9)]
    reference = on_ranks(
        tmp_path,
        checkpoints,
        processes,
        parallel,
        lambda load: load(3, dtype, micro_batch_size).of_sequences(stored, 4),
    )[0]
    seen: list[torch.Tensor] = []
    original = apertus_model.losses.preference.qrpo_residual

    def observed(log_ratio: torch.Tensor, *others: Any) -> torch.Tensor:
        assert torch.equal(log_ratio, torch.zeros_like(log_ratio)), log_ratio
        seen.append(log_ratio)
        return original(log_ratio, *others)

    monkeypatch.setattr(apertus_model.losses.preference, "qrpo_residual", observed)
    spec = segment(
        "qrpo",
        end_step=1,
        sample_offset=5,
        parallel=parallel,
        precision={"param": dtype},
        micro_batch_size=micro_batch_size,
    )  # rows 5 to 8: in the other place of their micro-batch than in stored order
    source = CheckpointSource(LocalCheckpoint(checkpoints / "step-3"), 3, optimizer=False, new_adapters=True)

    def counted(trainer: Any) -> None:
        assert sum(map(len, seen)) == 4 * parallel.cp * parallel.tp // processes

    data = lambda: PreferenceRows(reference=reference.numpy())  # noqa: E731
    result = train(
        tmp_path / "train", spec, processes=processes, source=source, begin_step=0, data=data, inspect=counted
    )[0]
    assert result.rows[0]["log_ratio"] == 0.0
    assert reference[5:9].abs().sum() > 10


def test_a_reference_of_another_model_gives_log_ratios_that_are_not_zero(
    tmp_path: Path, checkpoints: Path
) -> None:
    stored = [PreferenceRows().row(index) for index in range(4)]
    reference = on_ranks(
        tmp_path,
        checkpoints,
        1,
        Parallel(),
        lambda load: load(2, "float32", 4).of_sequences(stored, 4),
    )[0]
    source = CheckpointSource(LocalCheckpoint(checkpoints / "step-3"), 3, optimizer=False)
    data = lambda: PreferenceRows(reference=reference.numpy())  # noqa: E731
    row = train(tmp_path / "train", segment("qrpo", end_step=1), source=source, begin_step=0, data=data)[
        0
    ].rows[0]
    assert abs(row["log_ratio"]) > 1e-3


@pytest.mark.parametrize(("processes", "parallel"), LAYOUTS)
def test_loss_by_position_adds_up_the_labels_of_each_bucket(
    tmp_path: Path, checkpoints: Path, processes: int, parallel: Parallel
) -> None:
    samples = [SyntheticSamples()[index] for index in range(5)]
    edges = [0, 2, 5, 11]
    results = on_ranks(
        tmp_path, checkpoints, processes, parallel, lambda load: load(3).loss_by_position(samples, edges)
    )
    log_p = log_softmax(checkpoints, 3, samples)
    expected = [[0.0, 0] for _ in range(3)]
    for row, sample in zip(log_p, samples, strict=True):
        for place in np.flatnonzero(sample.labels >= 0):
            bucket = int(np.searchsorted(edges, sample.positions[place], side="right")) - 1
            if bucket < 3:
                expected[bucket][0] -= row[place, sample.labels[place]].item()
                expected[bucket][1] += 1
    outside = sum((sample.positions[sample.labels >= 0] >= 11).sum() for sample in samples)
    assert outside > 0
    for found in results:
        assert [tokens for _, tokens in found] == [tokens for _, tokens in expected]
        assert [nats for nats, _ in found] == pytest.approx([nats for nats, _ in expected], rel=1e-5)


@pytest.mark.parametrize(("processes", "parallel"), LAYOUTS)
def test_the_divergence_of_two_models_is_taken_where_labels_are(
    tmp_path: Path, checkpoints: Path, processes: int, parallel: Parallel
) -> None:
    samples = [SyntheticSamples()[index] for index in range(5)]

    def work(load: Callable[..., Evaluator]) -> Any:
        later, earlier = load(3), load(1)
        return later.divergence(earlier, samples), later.divergence(later, samples)

    results = on_ranks(tmp_path, checkpoints, processes, parallel, work)
    log_p, log_q = (log_softmax(checkpoints, step, samples) for step in (3, 1))
    scored = torch.from_numpy(np.stack([sample.labels for sample in samples])) >= 0
    expected = (log_p.exp() * (log_p - log_q)).sum(-1)[scored].sum().item()
    for (found, tokens), (itself, _) in results:
        assert found == pytest.approx(expected, rel=1e-5)
        assert tokens == int(scored.sum())
        assert itself == 0.0
