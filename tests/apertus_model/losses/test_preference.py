"""QRPO and DPO against their published formulas: in numpy and float64, and with 50 digits where float64
cannot compute them as written."""

import math

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from mpmath import mp

from apertus_model.losses.preference import beta_log_partition, dpo, qrpo_residual, sequence_beta
from tests.numerics import Numerics

mp.dps = 50
PUBLISHED = {0.1: 0.76974, 0.2: 0.67676, 1.0: 0.54132, 5.0: 0.50833}


def beta_log_z(beta: float) -> float:
    """beta ln(beta (exp(1/beta) - 1)), as it is written."""
    return beta * math.log(beta * (math.exp(1 / beta) - 1))


def test_the_partition_function_has_the_published_values() -> None:
    found = beta_log_partition(torch.tensor(list(PUBLISHED)))
    assert [round(value, 5) for value in found.tolist()] == list(PUBLISHED.values())


def exact_beta_log_z(beta: float) -> mp.mpf:
    """beta ln(beta (exp(1/beta) - 1)), as it is written, with 50 digits after any cancellation."""
    with mp.workdps(50 + max(0, round(2 * math.log10(beta)))):
        b = mp.mpf(beta)
        return b * mp.log(b * (mp.exp(1 / b) - 1))


BETAS = st.floats(-8, 8).map(lambda exponent: 10.0**exponent)


@settings(max_examples=300)
@given(beta=BETAS)
@example(1e-8)
@example(1e8)
@example(2.0)  # where one form of the formula follows the other
@example(math.nextafter(2.0, 3))
@example(0.1)
def test_the_partition_function_is_the_formula_for_every_beta(numerics: Numerics, beta: float) -> None:
    found = beta_log_partition(torch.tensor([beta], dtype=torch.float64)).item()
    numerics(
        "losses",
        "beta ln Z(beta), beta from 1e-8 to 1e8, float64, relative",
        source="Z = beta (exp(1 / beta) - 1), arXiv 2507.08068",
        against="the formula in 50 digits, hypothesis over beta",
        difference=float(abs(found / exact_beta_log_z(beta) - 1)),
        allowed=1e-14,
    )


def test_the_partition_function_reaches_its_limits_for_the_smallest_and_the_largest_float() -> None:
    extremes = torch.tensor([5e-324, 1e-300, 1e300, 1.7e308], dtype=torch.float64)
    assert beta_log_partition(extremes).tolist() == [1.0, 1.0, 0.5, 0.5]


LENGTHS = st.integers(1, 5000)
RATIOS = st.floats(-500, 500)
LIMITS = st.one_of(st.none(), st.floats(0.01, 10))


@settings(max_examples=100)
@given(
    ratio=RATIOS,
    quantile=st.floats(0, 1),
    length=LENGTHS,
    beta=st.floats(1e-3, 100),
    beta_max=st.one_of(st.none(), st.floats(0.01, 10)),
)
def test_the_qrpo_loss_is_the_published_formula(
    numerics: Numerics, ratio: float, quantile: float, length: int, beta: float, beta_max: float | None
) -> None:
    own = mp.mpf(beta) / length if beta_max is None else min(mp.mpf(beta) / length, mp.mpf(beta_max))
    expected = (quantile - exact_beta_log_z(float(own)) - own * mp.mpf(ratio)) ** 2
    betas = sequence_beta(torch.tensor([length]), beta=beta, length_normalised=True, beta_max=beta_max)
    found = (
        qrpo_residual(
            torch.tensor([ratio], dtype=torch.float64), torch.tensor([quantile], dtype=torch.float64), betas
        )
        .square()
        .item()
    )
    scale = 1 + abs(float(own) * ratio)  # of the terms, which may cancel
    numerics(
        "losses",
        "QRPO loss, float64, relative to (1 + beta abs(r))^2",
        source="(q - beta ln Z(beta) - beta r)^2, arXiv 2507.08068",
        against="the formula in 50 digits, hypothesis over r, q, beta, lengths and limits",
        difference=float(abs(found - expected)) / scale**2,
        allowed=1e-14,
    )


@settings(max_examples=100)
@given(margin=st.floats(-1000, 1000), smoothing=st.floats(0, 0.5))
def test_the_dpo_loss_is_the_published_formula_for_every_margin(
    numerics: Numerics, margin: float, smoothing: float
) -> None:
    m, e = mp.mpf(margin), mp.mpf(smoothing)
    with mp.workdps(1000):  # 1 - sigmoid of a large margin
        expected = -(1 - e) * mp.log(1 / (1 + mp.exp(-m))) - e * mp.log(1 - 1 / (1 + mp.exp(-m)))
    found = dpo(torch.tensor([margin], dtype=torch.float64), smoothing).item()
    numerics(
        "losses",
        "DPO loss with label smoothing 0 to 0.5, float64, relative above 0.1",
        source="-(1 - e) ln sigmoid(m) - e ln sigmoid(-m), arXiv 2305.18290",
        against="the formula in 1,000 digits, hypothesis over margins of -1,000 to 1,000 and smoothing",
        difference=float(abs(found - expected) / max(expected, 0.1)),
        allowed=1e-14,
    )


def test_beta_is_divided_by_the_length_and_limited() -> None:
    lengths = torch.tensor([1.0, 49.0, 50.0, 100.0, 500.0])
    found = sequence_beta(lengths, beta=5.0, length_normalised=True, beta_max=0.1)
    assert found.tolist() == [0.1, 0.1, 0.1, 0.05, 0.01]
    assert sequence_beta(lengths, beta=5.0, length_normalised=True).tolist() == pytest.approx(
        [5.0, 5 / 49, 0.1, 0.05, 0.01], rel=1e-15
    )
    assert sequence_beta(lengths, beta=5.0, length_normalised=False, beta_max=0.1).tolist() == [5.0] * 5


def test_the_qrpo_residual_is_the_published_formula_with_the_normalised_beta_everywhere() -> None:
    lengths, quantiles, log_ratio = (
        np.array([20, 80, 250]),
        np.array([1.0, 0.3, 0.0]),
        np.array([0.4, -2.0, 11.0]),
    )
    expected = []
    for length, quantile, ratio in zip(lengths, quantiles, log_ratio, strict=True):
        beta = min(5.0 / length, 0.1)
        expected.append(quantile - beta_log_z(beta) - beta * ratio)
    beta = sequence_beta(torch.from_numpy(lengths), beta=5.0, length_normalised=True, beta_max=0.1)
    found = qrpo_residual(torch.from_numpy(log_ratio), torch.from_numpy(quantiles), beta)
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-12)


def test_gradients_of_the_losses_are_those_of_finite_differences() -> None:
    values = torch.tensor([0.7, -1.3, 4.0], dtype=torch.float64, requires_grad=True)
    beta = torch.tensor([0.1, 0.05, 5.0], dtype=torch.float64)
    assert torch.autograd.gradcheck(
        lambda r: qrpo_residual(r, torch.tensor([0.2, 1.0, 0.0]), beta).square(), (values,)
    )
    assert torch.autograd.gradcheck(lambda m: dpo(m, 0.1), (values,))


def test_dpo_is_the_published_formula() -> None:
    chosen, rejected, beta = np.array([1.5, -2.0, 0.0]), np.array([-0.5, 3.0, 0.0]), 0.3
    sigmoid = 1 / (1 + np.exp(-(beta * chosen - beta * rejected)))
    margin = torch.from_numpy(beta * chosen) - torch.from_numpy(beta * rejected)
    np.testing.assert_allclose(dpo(margin).numpy(), -np.log(sigmoid), rtol=1e-13)
    np.testing.assert_allclose(
        dpo(margin, 0.2).numpy(), -0.8 * np.log(sigmoid) - 0.2 * np.log(1 - sigmoid), rtol=1e-13
    )
    assert dpo(margin)[2].item() == math.log(2)


def test_dpo_stays_finite_for_margins_whose_sigmoid_underflows() -> None:
    found = dpo(torch.tensor([-2000.0, 2000.0]))
    assert found.tolist() == [2000.0, 0.0]
