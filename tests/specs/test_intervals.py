"""The Young/Daly interval against the minimum of the expected time, and published figures of its accuracy."""

import math

import pytest

from specs.intervals import expected_time, longest_interval, young, young_daly


@pytest.mark.parametrize(
    ("write", "mean"), [(1.0, 3600.0), (30.0, 4 * 3600.0), (300.0, 8 * 3600.0), (600.0, 3600.0)]
)
def test_the_interval_is_near_the_minimum_of_the_expected_time(write: float, mean: float) -> None:
    candidates = [mean * 1.001**power for power in range(-12000, 1000)]
    best = min(candidates, key=lambda interval: expected_time(interval, write, mean))
    assert young_daly(write, mean) == pytest.approx(best, rel=5e-3)
    lost = expected_time(young_daly(write, mean), write, mean) / expected_time(best, write, mean)
    assert lost < 1 + 1e-5
    # the higher order is worth its name
    assert abs(young_daly(write, mean) - best) < abs(young(write, mean) - best)


def test_the_expected_time_is_that_of_a_simulation() -> None:
    from random import Random

    random, work, write, mean = Random(0), 50.0, 10.0, 100.0
    total = 0.0
    rounds = 100_000
    for _ in range(rounds):
        while (failure := random.expovariate(1 / mean)) < work + write:
            total += failure
        total += work + write
    assert total / rounds / work == pytest.approx(expected_time(work, write, mean), rel=0.01)


def test_the_formula_is_the_published_one() -> None:
    d, m = 60.0, 86400.0
    assert young(d, m) == pytest.approx(math.sqrt(2 * 60 * 86400))
    assert young_daly(d, m) == pytest.approx(
        math.sqrt(2 * d * m) * (1 + (d / (2 * m)) ** 0.5 / 3 + d / (2 * m) / 9) - d
    )
    assert young_daly(50.0, 20.0) == 20.0  # d >= 2 M


@pytest.mark.parametrize(("write", "mean"), [(0.01, 10_800.0), (300.0, 8 * 3600.0)])
def test_longest_interval_costs_the_stated_extra_time(write: float, mean: float) -> None:
    best = young_daly(write, mean)
    longest = longest_interval(0.01, best, write, mean)
    assert longest > best
    assert expected_time(longest, write, mean) - expected_time(best, write, mean) == pytest.approx(
        0.01, rel=1e-6
    )


def test_longest_interval_can_be_infinite() -> None:
    best = young_daly(1e6, 1.0)
    assert expected_time(best, 1e6, 1.0) == math.inf == longest_interval(0.01, best, 1e6, 1.0)


def test_times_that_are_not_positive_are_refused() -> None:
    with pytest.raises(ValueError, match="both must be positive"):
        young_daly(0.0, 100.0)
