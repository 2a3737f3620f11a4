"""AdEMAMix against the formula of the recipe in float64 and against torch's AdamW."""

import math

import pytest
import torch

from apertus_model.optimizers.ademamix import AdEMAMix, scheduled_alpha, scheduled_beta3


@pytest.mark.parametrize(
    ("step", "beta3", "alpha"),
    [(1, 0.900988, 0.00008), (1_000, 0.990901, 0.08), (10_000, 0.999009, 0.8), (50_000, 0.999800, 4.0)],
)
def test_warmups_pass_through_the_published_points(step: int, beta3: float, alpha: float) -> None:
    assert scheduled_beta3(step, 0.9, 0.9999, 100_000) == pytest.approx(beta3, abs=5e-7)
    assert scheduled_alpha(step, 8.0, 100_000) == pytest.approx(alpha)


def test_warmups_end_at_their_targets() -> None:
    for step in (100_000, 100_001, 10**7):
        assert scheduled_beta3(step, 0.9, 0.9999, 100_000) == 0.9999
        assert scheduled_alpha(step, 8.0, 100_000) == 8.0


def gradients(step: int) -> torch.Tensor:
    return torch.randn(7, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(step))


@pytest.mark.parametrize("foreach", [True, False])
def test_follows_the_formula_in_float64_over_many_steps(foreach: bool) -> None:
    b1, b2, b3, alpha, warm_a, warm_b = 0.9, 0.99, 0.999, 5.0, 40, 60
    weight = torch.randn(7, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(99))
    parameter = torch.nn.Parameter(weight.clone())
    optimizer = AdEMAMix(
        [parameter], betas=(b1, b2, b3), alpha=alpha, alpha_warmup=warm_a, beta3_warmup=warm_b,
        weight_decay=0.1, foreach=foreach,
    )  # fmt: skip
    m1, m2, v = (torch.zeros_like(weight) for _ in range(3))

    def f(beta: float) -> float:
        return math.log(0.5) / math.log(beta + 1e-8) - 1

    for t in range(1, 101):
        g, lr = gradients(t), 1e-2 / t
        r = min(1.0, t / warm_b)
        beta3_t = 0.5 ** (1 / ((1 - r) * f(b1) + r * f(b3) + 1)) if r < 1 else b3
        m1 = b1 * m1 + (1 - b1) * g
        m2 = beta3_t * m2 + (1 - beta3_t) * g
        v = b2 * v + (1 - b2) * g**2
        mixed = m1 / (1 - b1**t) + alpha * min(1.0, t / warm_a) * m2
        weight = weight - lr * (mixed / (v.sqrt() / math.sqrt(1 - b2**t) + 1e-8) + 0.1 * weight)
        optimizer.param_groups[0]["lr"] = lr
        parameter.grad = g
        optimizer.step()
    torch.testing.assert_close(parameter.detach(), weight, rtol=1e-12, atol=1e-13)


def test_without_the_slow_average_it_is_adamw_bit_by_bit() -> None:
    start = torch.randn(7, 5, generator=torch.Generator().manual_seed(1))
    ours, theirs = torch.nn.Parameter(start.clone()), torch.nn.Parameter(start.clone())
    a = AdEMAMix([ours], lr=3e-3, betas=(0.9, 0.99, 0.999), alpha=0.0, weight_decay=0.1)
    b = torch.optim.AdamW([theirs], lr=3e-3, betas=(0.9, 0.99), weight_decay=0.1, foreach=True)
    for t in range(50):
        ours.grad = theirs.grad = gradients(t).float()
        a.step()
        b.step()
    assert torch.equal(ours, theirs)


def test_many_parameters_at_once_give_the_same_bits_as_one_by_one() -> None:
    results = []
    for foreach in (True, False):
        parameters = [torch.nn.Parameter(torch.ones(size)) for size in (3, 5, 1)]
        optimizer = AdEMAMix(parameters, lr=1e-2, alpha_warmup=10, beta3_warmup=10, foreach=foreach)
        for t in range(15):
            for index, parameter in enumerate(parameters):
                generator = torch.Generator().manual_seed(100 * t + index)
                parameter.grad = torch.randn(parameter.shape, generator=generator)
            optimizer.step()
        results.append(torch.cat([parameter.detach() for parameter in parameters]))
    assert torch.equal(*results)


def test_a_parameter_without_gradient_keeps_its_own_step_count() -> None:
    busy, idle = torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(2))
    optimizer = AdEMAMix([busy, idle])
    for t in range(4):
        busy.grad = torch.ones(2)
        idle.grad = torch.ones(2) if t == 3 else None
        optimizer.step()
    assert optimizer.state[busy]["step"].item() == 4
    assert optimizer.state[idle]["step"].item() == 1


def test_a_beta_out_of_range_is_refused() -> None:
    with pytest.raises(ValueError, match=r"betas must lie in \[0, 1\)"):
        AdEMAMix([torch.nn.Parameter(torch.ones(1))], betas=(0.9, 0.999, 1.0))
