"""Sophia-G: its update against the published formula in float64; its estimate of the Hessian against the
exact Gauss-Newton diagonal."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch

from apertus_model.losses.cross_entropy import IGNORE_INDEX, LastStates
from apertus_model.optimizers.benchmark.sophia import Sophia, drawn_labels_loss
from apertus_model.trainer.objectives.base import MicroBatch
from apertus_model.trainer.objectives.cross_entropy import ExtraPass, with_places
from specs.optimizer import OptimizerSpec
from tests.apertus_model.harness import WeightedSamples, segment, train
from tests.machine import slow
from tests.numerics import Numerics

Tensor = torch.Tensor
SHAPE, STEPS, LR, RHO, DECAY, INTERVAL = (6, 4), 25, 3e-2, 0.3, 0.1, 10


def random(step: int, *, mean: float = 0.0) -> Tensor:
    return mean + torch.randn(SHAPE, dtype=torch.float64, generator=torch.Generator().manual_seed(step))


def squares_root(step: int) -> Tensor:
    """What the estimate's pass leaves as gradient; 0 in some places, whose h stays 0."""
    return random(1000 + step) * (torch.arange(24).view(SHAPE) % 5 > 0)


def test_the_update_is_the_published_one(numerics: Numerics) -> None:
    weight = torch.nn.Parameter(random(99))
    optimizer = Sophia(
        [weight], lr=LR, betas=(0.9, 0.8), rho=RHO, hessian_interval=INTERVAL, weight_decay=DECAY
    )
    w, m, h = random(99), torch.zeros(SHAPE, dtype=torch.float64), torch.zeros(SHAPE, dtype=torch.float64)
    clipped, updated = 0.0, []
    for t in range(1, STEPS + 1):
        if optimizer.extra_pass_due:
            updated.append(t)
            weight.grad = squares_root(t)
            optimizer.take_extra_gradients()
        weight.grad = random(t, mean=0.2)
        optimizer.step()
        m = 0.9 * m + 0.1 * random(t, mean=0.2)
        if t % INTERVAL == 1:
            h = 0.8 * h + 0.2 * squares_root(t) ** 2
        ratio = m / (RHO * h).clamp(min=1e-15)
        clipped += (ratio.abs() > 1).double().mean().item() / STEPS
        w = w - LR * DECAY * w
        w = w - LR * ratio.clamp(-1, 1)
    assert updated == [1, 11, 21]
    assert 0.3 < clipped < 0.9  # both kinds of elements are there
    torch.testing.assert_close(optimizer.state[weight]["hessian"], h, rtol=0, atol=1e-13)
    numerics(
        "optimizers",
        "Sophia-G, weights after 25 steps",
        source="arXiv 2305.14342, algorithm 3",
        against="the formula in float64, with an update of h every 10 steps",
        difference=(weight.detach() - w).abs().max().item(),
        allowed=1e-12,
    )


def test_every_step_estimates_with_an_interval_of_one() -> None:
    weight = torch.nn.Parameter(random(0))
    optimizer = Sophia([weight], hessian_interval=1)
    for step in range(3):
        assert optimizer.extra_pass_due
        weight.grad = random(step)
        optimizer.step()


@pytest.mark.parametrize(
    ("weighted", "draws", "relative"), [slow(False, 4000, 0.2), slow(True, 4000, 0.2), (True, 1000, 0.4)]
)
def test_the_estimate_is_the_gauss_newton_diagonal_on_average(
    weighted: bool, draws: int, relative: float, numerics: Numerics
) -> None:
    """For softmax regression it is sum_i w_i x_id^2 p_iv (1 - p_iv) / W. Every element of the mean of
    the draws lies within five standard errors, which are estimated from the draws themselves."""
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(1, 12, 3, generator=generator, dtype=torch.float64)
    weight = torch.randn(5, 3, generator=generator, dtype=torch.float64).requires_grad_()
    labels = torch.zeros(1, 12, dtype=torch.int64)
    labels[0, [2, 7]] = IGNORE_INDEX
    weights = torch.where(torch.arange(12) % 3 == 0, 0.25, 1.0)[None] if weighted else torch.ones(1, 12)
    extras = with_places({"weights": weights} if weighted else {}, labels, range(1))
    denominator = ExtraPass(drawn_labels_loss).count(labels, extras)
    estimates = []
    for step in range(draws):
        part = ExtraPass(partial(drawn_labels_loss, step=step)).loss(
            LastStates(hidden, weight, labels), MicroBatch(extras, denominator)
        )
        (gradient,) = torch.autograd.grad(part.loss, weight)
        estimates.append(gradient.square())
    found = torch.stack(estimates)
    p = (hidden[0] @ weight.detach().T).softmax(-1)
    kept = weights[0].double() * (labels[0] != IGNORE_INDEX)
    exact = torch.einsum("n,nd,nv->vd", kept, hidden[0] ** 2, p * (1 - p)) / kept.sum()
    numerics(
        "optimizers",
        "Gauss-Newton-Bartlett estimate, mean of draws, in its standard errors",
        source="arXiv 2305.14342, algorithm 2; weights as in `optimizers.benchmark.sophia`",
        against="the diagonal of the Gauss-Newton matrix of a softmax regression, exact",
        difference=((found.mean(0) - exact).abs() / (found.std(0) / draws**0.5)).max().item(),
        allowed=5,
    )
    # so that it says something: half of it or twice it would be noticed
    assert ((found.mean(0) - exact) / exact).abs().max() < relative


def test_samples_with_weights_are_trained(tmp_path: Path) -> None:
    spec = OptimizerSpec(name="sophia", lr=1e-3, hessian_interval=2).resolved({})
    result = train(
        tmp_path, segment("sft", optimizer=spec, end_step=4, micro_batch_size=2), data=WeightedSamples
    )[0]
    assert [row["step"] for row in result.rows] == [1, 2, 3, 4]
    assert result.rows[-1]["loss"] < result.rows[0]["loss"]


@pytest.mark.parametrize("kind", ["qrpo", "dpo"])
def test_the_engine_refuses_losses_that_are_no_likelihood(kind: str, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=rf"StageError.*and not {kind}"):
        train(tmp_path, segment(kind, optimizer=OptimizerSpec(name="sophia", lr=1e-3).resolved({})))
