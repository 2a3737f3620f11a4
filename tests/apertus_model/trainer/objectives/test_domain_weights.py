"""Learned weights of sources: the update by hand, and in the engine on any number of processes, with the same
bits after an interruption."""

from __future__ import annotations

from functools import partial
from math import exp
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from apertus_model.model.model import ApertusModel, model_config
from apertus_model.trainer.checkpoint import CheckpointSource
from apertus_model.trainer.objectives.domain_weights import POINTS, DomainWeights, thinned
from specs.launch import Parallel
from specs.stages.domain_weights import WeightUpdate
from tests.apertus_model.harness import (
    MODEL,
    ListedSamples,
    Result,
    difference,
    losses,
    same,
    segment,
    train,
)
from tests.apertus_model.trainer.checkpoints import LocalCheckpoint

ROWS, EACH = 12, 4


def stepped(objective: DomainWeights, step: int, *gradients: tuple[float, ...]) -> torch.Tensor:
    """The gradient of a step of one parameter whose sources have these."""
    parameter = torch.nn.Parameter(torch.zeros(len(gradients[0]), dtype=torch.float64))
    for gradient in gradients:  # of a source's part of the mean of all
        parameter.grad = torch.tensor(gradient, dtype=torch.float64) / len(gradients)
        objective.take([parameter])
    objective.combine([parameter], step)
    assert parameter.grad is not None
    return parameter.grad


def learned(sources: int, targets: list[int], *, rate: float = 0.1, **settings: Any) -> DomainWeights:
    update = WeightUpdate(**{"mu": 0.5, **settings})
    return DomainWeights(update, sources, targets, clip=2.5, rate=lambda steps_done: rate * (1 + steps_done))


def test_two_parameters_by_hand() -> None:
    """Sources (3, 4), clipped to (1.5, 2), and (0, -1), whose product with the target (0, 1) is negative."""
    objective = learned(3, [2])
    gradient = stepped(objective, 1, (3, 4), (0, -1), (0, 1))
    first = exp(0.1 / 0.5 * 2 / (3.5 / 2 + 1e-6))
    a, b = first / (first + 1), 1 / (first + 1)
    assert objective.weights.tolist() == pytest.approx([a, b], rel=1e-14)
    assert gradient.tolist() == pytest.approx([1.5 * a, 2 * a - b], rel=1e-14)
    stepped(
        objective, 2, (0, 1), (0, 2), (0, 1)
    )  # at twice the rate; 1 and 2 of a mean of 3/2, without the target's
    grown = [a * exp(0.2 / 0.5 / (3 / 2 + 1e-6)), b * exp(0.2 / 0.5 * 2 / (3 / 2 + 1e-6))]
    second = [one / sum(grown) for one in grown]
    assert objective.weights.tolist() == pytest.approx(second, rel=1e-14)
    mean = objective.state()["domain_weights"]["mean"]
    assert mean == pytest.approx([(a + second[0]) / 2, (b + second[1]) / 2], rel=1e-14)


def test_without_targets_the_goal_is_the_sum_of_all_sources_with_their_own() -> None:
    objective = learned(2, [], largest=0.8, smoothing=0.25)
    stepped(objective, 1, (3, 4), (0, -1))  # the goal is (1.5, 1): products 4.25 and -1
    first = exp(0.1 / 0.5 * 0.8)  # 4.25 / 1.75 is more than the largest
    assert objective.weights[0].item() == pytest.approx(0.75 * first / (first + 1) + 0.125, rel=1e-14)


def test_equal_sources_keep_equal_weights_and_the_targets_equal_gains() -> None:
    random = torch.Generator().manual_seed(1)
    equal, like = learned(2, []), learned(3, [2], rate=0.001)
    before = 0.5
    for step in range(1, 20):
        target = torch.randn(6, generator=random, dtype=torch.float64).tolist()
        stepped(equal, step, target, target)
        assert equal.weights.tolist() == pytest.approx([0.5, 0.5], abs=1e-15)
        stepped(like, step, target, [0.0] * 6, target)
        assert like.weights[0].item() > before
        before = like.weights[0].item()
        assert like.weights.sum().item() == pytest.approx(1, abs=1e-15)
        assert sum(like.state()["domain_weights"]["mean"]) == pytest.approx(1, abs=1e-14)


def test_a_trajectory_keeps_its_shape_in_few_points() -> None:
    found: dict[str, list[float]] = {}
    for step in range(1, 1001):
        found = thinned({**found, str(step): [float(step)]})
    assert [int(step) for step in found] == list(range(16, 1001, 16)) and len(found) <= POINTS


class OfSources(ListedSamples):
    """Rows of three sources, four of each in a step."""

    def __getitem__(self, index: int) -> Any:
        sample = super().__getitem__(index)
        return SimpleNamespace(**sample._asdict(), source=index % ROWS // EACH)


def spec_of(**changes: Any) -> Any:
    fields: dict[str, Any] = {
        "sources": 3,
        "targets": [1],
        "global_batch_size": ROWS,
        "source_names": ["a", "b", "c"],
        "end_step": 4,
        "checkpoint": {"interval": 2},
        "update": WeightUpdate(mu=0.001),
    }
    return segment("domain_weights", **fields | changes)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Result]:
    folder = tmp_path_factory.mktemp("whole")
    return folder, train(folder, spec_of(), data=OfSources)[0]


def weights_of(result: Result) -> list[float]:
    return [row[f"weight/{name}"] for row in result.rows for name in "ac"]


def test_the_first_step_has_the_gradients_of_the_sources_by_themselves(whole: tuple[Path, Result]) -> None:
    config = model_config(MODEL, sequence_length=16, attention="sdpa", seed=7)
    torch.manual_seed(0)
    model: Any = ApertusModel(config)
    model.init_states()
    samples = OfSources()
    gradients, means = [], []
    for source in range(3):
        rows = [samples[source * EACH + row] for row in range(EACH)]
        tokens, labels, positions = (
            torch.stack([torch.from_numpy(getattr(row, name)) for row in rows])
            for name in ("input", "labels", "positions")
        )
        loss = torch.nn.functional.cross_entropy(
            model(tokens, positions=positions).flatten(0, 1), labels.flatten(), ignore_index=-100
        )
        means.append(loss.item())
        gradients.append(torch.autograd.grad(loss, [*model.parameters()]))
    row = whole[1].rows[0]
    assert row["loss"] == pytest.approx(sum(means) / 3, rel=1e-6)
    clip = spec_of().optimizer.grad_clip
    flat = [torch.cat([one.double().flatten() for one in of]) for of in gradients]
    flat = [one * min(1, clip / one.norm().item()) for one in flat]
    products = {name: (flat[at] @ flat[1]).item() for at, name in ((0, "a"), (2, "c"))}
    assert {name: row[f"alignment/{name}"] for name in "ac"} == pytest.approx(products, rel=1e-5)
    total = row["weight/a"] * flat[0] + row["weight/c"] * flat[2]
    assert row["grad_norm"] == pytest.approx(total.norm().item(), rel=1e-5)


slow = partial(pytest.param, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    "layout",
    [
        Parallel(),
        slow(Parallel(dp_replicate=2, dp_shard=1)),
        slow(Parallel(tp=2, sequence_parallel=True)),
        slow(Parallel(tp=2)),
        slow(Parallel(cp=2)),
    ],
)
def test_two_processes_learn_the_same(tmp_path: Path, whole: tuple[Path, Result], layout: Parallel) -> None:
    spec = spec_of(parallel=layout, micro_batch_size=1)
    first, _ = train(tmp_path, spec, processes=2, data=OfSources)
    assert losses(first) == pytest.approx(losses(whole[1]), rel=1e-5)
    assert weights_of(first) == pytest.approx(weights_of(whole[1]), rel=1e-5)
    assert difference(first.weights, whole[1].weights) < 1e-4


def test_a_continued_run_has_the_same_bits(tmp_path: Path, whole: tuple[Path, Result]) -> None:
    folder, result = whole
    (continued,) = train(
        tmp_path,
        spec_of(),
        source=CheckpointSource(LocalCheckpoint(folder / "step-2"), 2, optimizer=True),
        begin_step=2,
        objective=result.objective[2],
        data=OfSources,
    )
    assert weights_of(continued) == weights_of(result)[4:]
    assert continued.objective[4] == result.objective[4]
    assert same(continued.weights, result.weights)


def test_a_batch_that_is_not_equal_on_every_process_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="has not equally many of 3 sources"):
        train(tmp_path, spec_of(global_batch_size=10), data=OfSources)
