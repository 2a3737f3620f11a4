"""Stochastic rounding."""

import torch

from apertus_model.optimizers.rounding import round_stochastically, rounding_seed

# Moments in bfloat16


def test_stochastic_rounding_keeps_the_mean_and_what_bfloat16_has() -> None:
    values = torch.tensor([1.0 + 1 / 512, -3.0 - 1 / 1024, 1e-20, 0.0, -1.0, 2.0**100])
    drawn = torch.stack(
        [round_stochastically(values, rounding_seed("w", step, 0)) for step in range(4000)]
    ).double()
    assert torch.equal(drawn[:, 3:], values[3:].double().expand(4000, 3))
    # of bfloat16 at the first three
    spacing = torch.tensor([2.0**-7, 2.0**-6, 2.0**-74], dtype=torch.float64)
    exact = values[:3].double()
    assert ((drawn[:, :3] - exact).abs() < spacing).all()
    # four standard errors at most
    assert ((drawn[:, :3].mean(0) - exact).abs() < 4 * spacing / 2 / 4000**0.5).all()


def test_rounding_does_not_depend_on_how_a_matrix_is_cut() -> None:
    whole = torch.randn(6, 10, generator=torch.Generator().manual_seed(0))
    expected = round_stochastically(whole, seed=5)
    assert torch.equal(round_stochastically(whole[2:5].contiguous(), 5, offset=20, row=10), expected[2:5])
    assert torch.equal(
        round_stochastically(whole[2:5, 4:7].contiguous(), 5, offset=24, row=10), expected[2:5, 4:7]
    )
    assert not torch.equal(round_stochastically(whole, seed=6), expected)
