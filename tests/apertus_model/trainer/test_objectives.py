"""Training with each objective: the published formula over the whole batch, whatever the layout and the
accumulation."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from apertus_model.model.model import model_config
from apertus_model.trainer.checkpoint import CheckpointSource
from specs.launch import Parallel
from specs.model import ModelSpec
from specs.stages.dpo import DpoLoss
from specs.stages.qrpo import QrpoLoss
from specs.stages.reward_model import RewardLoss
from tests.apertus_model.harness import (
    MODEL,
    PreferenceRows,
    RewardRows,
    SyntheticSamples,
    WeightedSamples,
    difference,
    losses,
    same,
    segment,
    train,
)
from tests.apertus_model.trainer.checkpoints import LocalCheckpoint
from tests.machine import slow
from tests.numerics import Numerics

KINDS: dict[str, tuple[dict[str, Any], Any]] = {
    "weighted-cross-entropy": ({"kind": "sft", "prompt_weight": 0.25}, WeightedSamples),
    "qrpo": ({"kind": "qrpo", "loss": QrpoLoss(beta=2.0, beta_max=0.5)}, PreferenceRows),
    "dpo": ({"kind": "dpo", "loss": DpoLoss(beta=2.0, label_smoothing=0.1)}, PreferenceRows),
    "reward_model": ({"kind": "reward_model", "loss": RewardLoss(centring=0.05)}, RewardRows),
}


def spec_of(name: str, **changes: Any) -> Any:
    return segment(**KINDS[name][0], **changes)


def forward(samples: list[Any], spec: ModelSpec = MODEL) -> tuple[Any, torch.Tensor]:
    """The new model, and its outputs in float64: logits, (batch, length, vocabulary), or rewards, (batch,
    length, 1), of a reward model."""
    model = model_config(spec, sequence_length=16, attention="sdpa", seed=7).build()
    model.init_weights()
    tokens, positions = (
        torch.from_numpy(np.stack([getattr(sample, name) for sample in samples]))
        for name in ("input", "positions")
    )
    return model, model(tokens, positions).double()


def weighted(samples: list[Any], log_p: torch.Tensor) -> torch.Tensor:
    terms, norm = [], 0.0
    for row, sample in zip(log_p, samples, strict=True):
        for i, label in enumerate(sample.labels):
            if label >= 0:
                terms.append(-row[i, label] * float(sample.weights[i]))
                norm += float(sample.weights[i])
    return torch.stack(terms).sum() / norm


def log_ratios(samples: list[Any], log_p: torch.Tensor) -> list[tuple[torch.Tensor, int, float]]:
    """(r, |y|, quantile) of every sequence, in order: chosen, rejected, chosen, ..."""
    found = []
    for row, sample in zip(log_p, samples, strict=True):
        for number in np.flatnonzero(sample.present):
            places = np.flatnonzero(sample.segments == number)
            total = torch.stack([row[i, sample.labels[i]] for i in places]).sum()
            found.append(
                (total - float(sample.reference[number]), len(places), float(sample.rewards[number]))
            )
    return found


def qrpo(samples: list[Any], log_p: torch.Tensor) -> torch.Tensor:
    terms = []
    for ratio, length, quantile in log_ratios(samples, log_p):
        beta = min(2.0 / length, 0.5)
        terms.append((quantile - beta * math.log(beta * (math.exp(1 / beta) - 1)) - beta * ratio) ** 2)
    return torch.stack(terms).mean()


def dpo(samples: list[Any], log_p: torch.Tensor) -> torch.Tensor:
    implicit = [2.0 / length * ratio for ratio, length, _ in log_ratios(samples, log_p)]
    terms = []
    for chosen, rejected in zip(implicit[0::2], implicit[1::2], strict=True):
        sigmoid = 1 / (1 + torch.exp(-(chosen - rejected)))
        terms.append(-0.9 * torch.log(sigmoid) - 0.1 * torch.log(1 - sigmoid))
    return torch.stack(terms).mean()


def reward_model(samples: list[Any], rewards: torch.Tensor) -> torch.Tensor:
    terms = []
    for row, sample in zip(rewards[..., 0], samples, strict=True):
        for pair in np.flatnonzero(sample.present):
            chosen, rejected = (
                row[np.flatnonzero(sample.segments == number)].sum() for number in (2 * pair, 2 * pair + 1)
            )
            difference = chosen - rejected - float(sample.margins[pair])
            terms.append(-torch.log(1 / (1 + torch.exp(-difference))) + 0.05 * (chosen + rejected) ** 2)
    return torch.stack(terms).mean()


SOURCES = {
    "weighted-cross-entropy": "-sum w ln p / sum w",
    "qrpo": "arXiv 2507.08068",
    "dpo": "arXiv 2305.18290",
    "reward_model": "arXiv 2307.09288, 2312.09244",
}
FORMULAS = {"weighted-cross-entropy": weighted, "qrpo": qrpo, "dpo": dpo, "reward_model": reward_model}


@pytest.mark.parametrize("name", KINDS)
def test_the_first_step_has_the_loss_and_the_gradient_of_the_published_formula(
    tmp_path: Path, name: str, numerics: Numerics
) -> None:
    spec = spec_of(name, end_step=1)
    row = train(tmp_path, spec, data=KINDS[name][1])[0].rows[0]
    samples = [KINDS[name][1]()[index] for index in range(4)]
    model, outputs = forward(samples, spec.model)
    loss = FORMULAS[name](samples, outputs if spec.model.head == "reward" else outputs.log_softmax(-1))
    loss.backward()
    norm = math.sqrt(sum(parameter.grad.double().square().sum().item() for parameter in model.parameters()))
    for what, found, expected in (
        ("loss", row["loss"], loss.item()),
        ("gradient norm", row["grad_norm"], norm),
    ):
        numerics(
            "losses",
            f"{what} of the first training step, {name}, relative",
            source=SOURCES[name],
            against="the formula over all logits in float64",
            difference=abs(found / expected - 1),
            allowed=1e-5,
        )
    assert row["masked_share"] == pytest.approx(
        np.mean([(sample.labels < 0).mean() for sample in samples]), abs=1e-6
    )


def test_the_first_step_minimises_the_z_loss_where_it_is_stated(tmp_path: Path) -> None:
    row = train(tmp_path, segment(z_loss=0.1, end_step=1))[0].rows[0]
    samples = [SyntheticSamples()[index] for index in range(4)]
    model, logits = forward(samples)
    labels = torch.from_numpy(np.stack([sample.labels for sample in samples]))
    kept = labels >= 0
    entropy = torch.nn.functional.cross_entropy(logits[kept], labels[kept])
    loss = entropy + 0.1 * logits[kept].logsumexp(-1).square().mean()
    loss.backward()
    norm = math.sqrt(sum(parameter.grad.double().square().sum().item() for parameter in model.parameters()))
    assert (row["loss"], row["grad_norm"]) == pytest.approx((loss.item(), norm), rel=1e-5)
    assert row["loss"] - entropy.item() > 1


LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "accumulated": (1, {"micro_batch_size": 1}),
    "sharded": (2, {}),
    "sharded and accumulated": (2, {"micro_batch_size": 1}),
    "context": (2, {"parallel": Parallel(cp=2), "micro_batch_size": 2}),
    "head and tail of the context": (2, {"parallel": Parallel(cp=2, cp_load_balancer="head-tail")}),
}

SLOW = {"accumulated", "sharded", "context"}  # others do it too


@pytest.fixture(scope="module", params=list(KINDS))
def alone(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Any]:
    """Three steps of one process that takes the whole batch at once."""
    name = request.param
    return name, train(tmp_path_factory.mktemp("alone"), spec_of(name, end_step=3), data=KINDS[name][1])[0]


@pytest.mark.parametrize("layout", [name if name not in SLOW else slow(name) for name in LAYOUTS])
def test_layout_and_accumulation_change_neither_loss_nor_gradient(
    tmp_path: Path, alone: tuple[str, Any], layout: str
) -> None:
    name, reference = alone
    processes, changes = LAYOUTS[layout]
    result = train(tmp_path, spec_of(name, end_step=3, **changes), processes=processes, data=KINDS[name][1])[
        0
    ]
    measured = set(reference.rows[0]) - {"time", "tokens_per_second"}
    assert set(result.rows[0]) - {"time", "tokens_per_second"} == measured
    for row, expected in zip(result.rows, reference.rows, strict=True):
        assert {key: row[key] for key in measured} == pytest.approx(
            {key: expected[key] for key in measured}, rel=1e-4, abs=1e-5
        )
    assert difference(result.weights, reference.weights) < 1e-4


@pytest.mark.parametrize("sequence_parallel", [slow(False), True])
def test_ranks_that_share_the_vocabulary_have_the_loss_and_the_gradient_of_one(
    tmp_path: Path, alone: tuple[str, Any], sequence_parallel: bool
) -> None:
    name, reference = alone
    spec = spec_of(name, end_step=3, parallel=Parallel(tp=2, sequence_parallel=sequence_parallel))
    result = train(tmp_path, spec, processes=2, data=KINDS[name][1])[0]
    assert losses(result) == pytest.approx(losses(reference), abs=1e-5)
    assert [row["grad_norm"] for row in result.rows] == pytest.approx(
        [row["grad_norm"] for row in reference.rows], rel=1e-4
    )
    assert difference(result.weights, reference.weights) < 1e-4


@pytest.mark.parametrize("name", ["qrpo", "dpo"])
def test_the_metrics_of_a_preference_step_are_means_over_the_whole_batch(tmp_path: Path, name: str) -> None:
    row = train(tmp_path, spec_of(name, end_step=1, micro_batch_size=1), processes=2, data=PreferenceRows)[
        0
    ].rows[0]
    samples = [PreferenceRows().row(index) for index in range(4)]
    found = log_ratios(samples, forward(samples)[1].detach().log_softmax(-1))
    ratios = np.array([ratio.item() for ratio, _, _ in found])
    betas = np.array([min(2.0 / length, 0.5) if name == "qrpo" else 2.0 / length for _, length, _ in found])
    assert len(ratios) == 2 * (1 + 2 + 1 + 2)
    assert row["log_ratio"] == pytest.approx(ratios.mean(), rel=1e-5)
    assert row["log_ratio_chosen"] == pytest.approx(ratios[0::2].mean(), rel=1e-5)
    assert row["log_ratio_rejected"] == pytest.approx(ratios[1::2].mean(), rel=1e-5)
    assert row["accuracy"] == ((betas * ratios)[0::2] > (betas * ratios)[1::2]).mean()
    if name == "qrpo":
        quantiles = np.array([quantile for _, _, quantile in found])
        target = quantiles - betas * np.log(betas * (np.exp(1 / betas) - 1))
        assert row["target"] == pytest.approx(target.mean(), rel=1e-6)
        assert row["residual"] == pytest.approx((target - betas * ratios).mean(), rel=1e-5)
        assert row["loss"] == pytest.approx(((target - betas * ratios) ** 2).mean(), rel=1e-5)
    else:
        assert row["margin"] == pytest.approx(
            ((betas * ratios)[0::2] - (betas * ratios)[1::2]).mean(), rel=1e-5
        )


@pytest.mark.parametrize(("name", "processes"), [slow("qrpo", 1), ("qrpo", 2), slow("reward_model", 2)])
def test_preference_training_resumes_from_a_checkpoint_with_the_same_bits(
    tmp_path: Path, name: str, processes: int
) -> None:
    spec = spec_of(name, end_step=4, micro_batch_size=1)
    settings = {"processes": processes, "data": KINDS[name][1], "states": True}
    whole = train(tmp_path / "whole", spec, **settings)[0]
    source = CheckpointSource(LocalCheckpoint(tmp_path / "whole/step-3"), 3, optimizer=True)
    rest = train(tmp_path / "rest", spec, source=source, begin_step=3, **settings)[0]
    assert same(rest.weights, whole.weights)
    assert same(rest.optimizer, whole.optimizer)
    assert rest.rows[0]["loss"] == whole.rows[3]["loss"]


@pytest.mark.parametrize("name", ["dpo", "reward_model"])
def test_training_on_preferences_raises_the_chosen_over_the_rejected(tmp_path: Path, name: str) -> None:
    rows = train(tmp_path, spec_of(name, end_step=12), data=lambda: KINDS[name][1](rows=4))[0].rows
    assert rows[-1]["loss"] < rows[0]["loss"]
    assert rows[-1]["accuracy"] > 0.9
