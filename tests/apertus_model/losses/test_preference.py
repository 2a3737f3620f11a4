"""QRPO and DPO against their published formulas, in numpy and float64."""

import math

import numpy as np
import pytest
import torch

from apertus_model.losses.preference import beta_log_partition, dpo, qrpo_residual, sequence_beta

PUBLISHED = {0.1: 0.76974, 0.2: 0.67676, 1.0: 0.54132, 5.0: 0.50833}


def beta_log_z(beta: float) -> float:
    """beta ln(beta (exp(1/beta) - 1)), as it is written."""
    return beta * math.log(beta * (math.exp(1 / beta) - 1))


def test_the_partition_function_has_the_published_values() -> None:
    found = beta_log_partition(torch.tensor(list(PUBLISHED)))
    assert [round(value, 5) for value in found.tolist()] == list(PUBLISHED.values())


def test_the_partition_function_is_the_formula_where_that_can_be_computed() -> None:
    betas = np.geomspace(0.002, 50, 200)
    found = beta_log_partition(torch.from_numpy(betas))
    np.testing.assert_allclose(found.numpy(), [beta_log_z(beta) for beta in betas], rtol=1e-12)


def test_the_partition_function_reaches_its_limits_for_the_smallest_and_the_largest_beta() -> None:
    small, large = 1e-9, 1e6
    assert beta_log_partition(torch.tensor([small], dtype=torch.float64)).item() == 1 + small * math.log(small)
    # ln((exp(x) - 1) / x) = x/2 + x^2/24 - ...
    assert beta_log_partition(torch.tensor([large], dtype=torch.float64)).item() == pytest.approx(0.5 + 1 / (24 * large), rel=1e-9)


def test_beta_is_divided_by_the_length_and_limited() -> None:
    lengths = torch.tensor([1.0, 49.0, 50.0, 100.0, 500.0])
    found = sequence_beta(lengths, beta=5.0, length_normalised=True, beta_max=0.1)
    assert found.tolist() == [0.1, 0.1, 0.1, 0.05, 0.01]
    assert sequence_beta(lengths, beta=5.0, length_normalised=True).tolist() == pytest.approx([5.0, 5 / 49, 0.1, 0.05, 0.01], rel=1e-15)
    assert sequence_beta(lengths, beta=5.0, length_normalised=False, beta_max=0.1).tolist() == [5.0] * 5


def test_the_qrpo_residual_is_the_published_formula_with_the_normalised_beta_everywhere() -> None:
    lengths, quantiles, log_ratio = np.array([20, 80, 250]), np.array([1.0, 0.3, 0.0]), np.array([0.4, -2.0, 11.0])
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
    assert torch.autograd.gradcheck(lambda r: qrpo_residual(r, torch.tensor([0.2, 1.0, 0.0]), beta).square(), (values,))
    assert torch.autograd.gradcheck(lambda m: dpo(m, 0.1), (values,))


def test_dpo_is_the_published_formula() -> None:
    chosen, rejected, beta = np.array([1.5, -2.0, 0.0]), np.array([-0.5, 3.0, 0.0]), 0.3
    sigmoid = 1 / (1 + np.exp(-(beta * chosen - beta * rejected)))
    margin = torch.from_numpy(beta * chosen) - torch.from_numpy(beta * rejected)
    np.testing.assert_allclose(dpo(margin).numpy(), -np.log(sigmoid), rtol=1e-13)
    np.testing.assert_allclose(dpo(margin, 0.2).numpy(), -0.8 * np.log(sigmoid) - 0.2 * np.log(1 - sigmoid), rtol=1e-13)
    assert dpo(margin)[2].item() == math.log(2)


def test_dpo_stays_finite_for_margins_whose_sigmoid_underflows() -> None:
    found = dpo(torch.tensor([-2000.0, 2000.0]))
    assert found.tolist() == [2000.0, 0.0]
