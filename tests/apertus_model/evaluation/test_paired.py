from __future__ import annotations

import time

import numpy as np
import pytest

from apertus_model.evaluation.paired import PairedComparison, bootstrap_means, compare


def test_constant_differences_have_an_interval_of_no_width() -> None:
    assert compare([1.5, 2.5, 3.5], [1.0, 2.0, 3.0]) == PairedComparison(0.5, 0.5, 0.5, 1.0, 3)


def test_two_prompts_give_the_means_of_all_resamples() -> None:
    # Means of two draws from {0, 1}: 0 and 1 with probability 1/4 each, so both quantiles are at the ends.
    assert compare([0.0, 1.0], [0.0, 0.0]) == PairedComparison(0.5, 0.0, 1.0, 0.75, 2)
    means, counts = np.unique(bootstrap_means(np.array([0.0, 1.0]), seed=0), return_counts=True)
    assert means.tolist() == [0.0, 0.5, 1.0]
    np.testing.assert_allclose(counts / counts.sum(), [0.25, 0.5, 0.25], atol=0.02)


def test_prompts_are_compared_with_themselves() -> None:
    random = np.random.default_rng(0)
    hard = random.normal(size=200) * 10
    found = compare(hard + 0.5 + random.normal(size=200) * 0.1, hard)
    assert 0.45 < found.low < found.difference < found.high < 0.55


def test_wins_count_ties_half_and_swapping_turns_the_comparison_around() -> None:
    first, second = [1.0, 0.0, 2.0, 5.0], [0.0, 1.0, 2.0, 1.0]
    found = compare(first, second)
    assert (found.difference, found.wins, found.count) == (1.0, (2 + 0.5) / 4, 4)
    back = compare(second, first)
    assert (back.difference, back.wins) == (-1.0, 1.5 / 4)
    assert (back.low, back.high) == pytest.approx((-found.high, -found.low), abs=1e-12)


def test_the_same_scores_give_the_same_interval() -> None:
    random = np.random.default_rng(1)
    first, second = random.normal(size=50), random.normal(size=50)
    assert compare(first, second) == compare(first, second)


def test_large_samples_agree_with_the_normal_approximation() -> None:
    differences = np.random.default_rng(2).normal(size=5000)
    begun = time.perf_counter()
    found = compare(differences, np.zeros(5000))
    assert time.perf_counter() - begun < 5
    half = 1.96 * differences.std() / np.sqrt(5000)
    assert (found.low, found.high) == pytest.approx(
        (found.difference - half, found.difference + half), abs=0.002
    )


@pytest.mark.parametrize("skewed", [False, True])
def test_the_interval_covers_the_truth_about_95_times_of_100(skewed: bool) -> None:
    random = np.random.default_rng(3)
    covered = 0
    for _ in range(300):
        differences = random.exponential(size=60) - 1 if skewed else random.normal(size=60)
        found = compare(differences + 0.3, np.zeros(60))
        covered += found.low <= 0.3 <= found.high
    assert 0.90 <= covered / 300 <= 0.98
