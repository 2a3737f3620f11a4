from __future__ import annotations

from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from apertus_model.losses.cross_entropy import LastStates
from apertus_model.losses.preference import bradley_terry
from apertus_model.losses.sequences import token_rewards


def test_a_reward_is_the_product_at_its_place_and_other_places_have_no_gradient() -> None:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(2, 5, 8, generator=generator, requires_grad=True)
    weight = torch.randn(1, 8, generator=generator)
    labels = torch.full((2, 5), -100)
    labels[0, 3], labels[1, 4] = 7, 0
    found = token_rewards(LastStates(hidden, weight, labels))
    exact = (hidden.double() @ weight[0].double()).detach()
    assert found[0, 3].item() == pytest.approx(exact[0, 3].item(), rel=1e-6)
    assert found[1, 4].item() == pytest.approx(exact[1, 4].item(), rel=1e-6)
    assert (found != 0).sum() == 2
    found.sum().backward()
    assert hidden.grad is not None
    assert torch.equal(hidden.grad, (labels != -100)[..., None] * weight[0])


def test_rounding_to_bfloat16_makes_no_ties() -> None:
    hidden = torch.ones(1, 2, 64, dtype=torch.bfloat16)
    hidden[0, 1, 0] = 1 + 2**-7
    weight = torch.ones(1, 64, dtype=torch.bfloat16)
    assert token_rewards(LastStates(hidden, weight, torch.zeros(1, 2, dtype=torch.int64))).tolist() == [
        [64, 64 + 2**-7]
    ]
    assert len(set((hidden @ weight[0]).flatten().tolist())) == 1


@pytest.mark.parametrize("centring", [0.0, 0.01])
def test_the_loss_is_that_of_the_formula_in_float64(centring: float) -> None:
    chosen, rejected, margin = np.random.default_rng(0).normal(size=(3, 50)) * 3
    difference = chosen - rejected - margin
    expected = np.log1p(np.exp(-difference)) + centring * (chosen + rejected) ** 2
    found = bradley_terry(*map(torch.from_numpy, (chosen, rejected, margin)), centring)
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-12)


@pytest.mark.parametrize("centring", [None, 0.01])
@pytest.mark.parametrize("margins", [False, True])
def test_the_loss_is_that_of_trl_on_the_same_batch(centring: float | None, margins: bool) -> None:
    trl = pytest.importorskip("trl", reason="pip install --no-deps trl==1.16.0 adds the peer")
    rewards = torch.randn(12, 1, generator=torch.Generator().manual_seed(1))
    margin = torch.rand(6, generator=torch.Generator().manual_seed(2))
    batch: dict[str, Any] = {"margin": margin} if margins else {}
    trainer = SimpleNamespace(
        model=SimpleNamespace(training=False),
        args=SimpleNamespace(center_rewards_coefficient=centring),
        accelerator=SimpleNamespace(gather=lambda x: x, gather_for_metrics=lambda x: x),
        _metrics={"eval": defaultdict(list)},
        _total_train_tokens=0,
    )
    theirs = trl.RewardTrainer.compute_loss(trainer, lambda **_: SimpleNamespace(logits=rewards), batch)
    chosen, rejected = rewards[:, 0].chunk(2)
    own = bradley_terry(chosen, rejected, margin if margins else torch.zeros(6), centring or 0.0).mean()
    assert own.item() == pytest.approx(theirs.item(), rel=1e-6)
