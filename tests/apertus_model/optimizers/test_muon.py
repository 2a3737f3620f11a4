"""Muon."""

import pytest
import torch

from apertus_model.optimizers.muon import Muon
from tests.numerics import Numerics, largest_difference

SHAPE, STEPS, LR, DECAY = (6, 4), 12, 3e-2, 0.1
Tensor = torch.Tensor


def gradient(step: int) -> Tensor:
    return 0.5 + 0.5 * torch.randn(SHAPE, dtype=torch.float64, generator=torch.Generator().manual_seed(step))


def start() -> Tensor:
    return torch.randn(SHAPE, dtype=torch.float64, generator=torch.Generator().manual_seed(99))


def test_muon_makes_the_singular_values_of_an_average_gradient_about_one() -> None:
    weight = torch.nn.Parameter(start())
    optimizer = Muon([weight], lr=LR, weight_decay=0.0, momentum=0.95, adjust_lr_fn="match_rms_adamw")
    weight.grad = gradient(1)
    optimizer.step()
    update = (start() - weight.detach()) / (LR * 0.2 * 6**0.5)
    u, _, v = torch.linalg.svd(gradient(1), full_matrices=False)
    values = u.T @ update @ v.T
    sizes = values.diagonal()
    # where the quintic iteration ends, for values that are not tiny
    assert sizes.min() > 0.6 and sizes.max() < 1.3
    assert (values - sizes.diag()).abs().max() < 0.05


@pytest.mark.parametrize("adjust", ["original", "match_rms_adamw"])
def test_muon_is_torchs_bit_by_bit(adjust: str, numerics: Numerics) -> None:
    results = []
    for kind in (Muon, torch.optim.Muon):
        weight = torch.nn.Parameter(start().float())
        optimizer = kind([weight], lr=LR, weight_decay=DECAY, momentum=0.9, adjust_lr_fn=adjust)
        for step in range(STEPS):
            weight.grad = gradient(step).float()
            optimizer.step()
        results.append(weight.detach())
    numerics(
        "optimizers",
        f"muon, weights after {STEPS} steps",
        source="kellerjordan.github.io/posts/muon; arXiv 2502.16982 for match_rms_adamw",
        against="torch.optim.Muon, both adjustments of the rate",
        difference=largest_difference(*results),
        allowed=0.0,
    )
