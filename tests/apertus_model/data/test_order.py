from __future__ import annotations

from collections import Counter
from fractions import Fraction

import pytest

from apertus_model.data.order import MixtureOrder
from tests.numerics import Numerics

MIXTURES = [
    [1],
    [1, 1],
    [3, 1],
    [5, 3, 2],
    [Fraction(1, 3), Fraction(1, 7), Fraction(11, 21)],
    [100, 1, 1, 7],
    [1000, 999, 1],
]


@pytest.mark.parametrize("weights", MIXTURES)
def test_counts_follow_the_weights_within_the_stated_bounds(weights: list[int | Fraction], numerics: Numerics) -> None:
    order = MixtureOrder(weights, [10] * len(weights), seed=7)
    counts = [0] * len(weights)
    worst = Fraction(0)
    for i in range(order.block * 6 + 3):
        counts[order[i].source] += 1
        for source, share in enumerate(order.shares):
            difference = abs(counts[source] - (i + 1) * share)
            worst = max(worst, difference / order.discrepancy(source))
            if (i + 1) % order.block == 0:
                assert difference < 1
    numerics(
        "data",
        "samples drawn of a source, as a share of the bound 1 + 2 w + block w (1 - w)",
        source="apertus_model/data/order.py",
        against="n w in rational numbers, after every sample of seven mixtures",
        difference=float(worst),
        allowed=1.0,
    )
    assert order.drawn(order.block * 6 + 3) == counts


def test_no_source_is_missing_from_two_blocks_in_a_row() -> None:
    order = MixtureOrder([100, 1, 1, 7], [10] * 4, seed=1)
    for block in range(50):
        assert {order[i].source for i in range(block * order.block, (block + 2) * order.block)} == {0, 1, 2, 3}


def test_a_source_is_drawn_without_gaps_and_each_epoch_is_a_permutation() -> None:
    order = MixtureOrder([2, 1], [5, 3], seed=3)
    draws = [order[i] for i in range(order.block * 30)]
    for source, windows in enumerate((5, 3)):
        mine = sorted((draw for draw in draws if draw.source == source), key=lambda draw: draw.draw)
        assert [draw.draw for draw in mine] == list(range(len(mine)))
        for epoch in range(len(mine) // windows):
            one = mine[epoch * windows : (epoch + 1) * windows]
            assert sorted(draw.window for draw in one) == list(range(windows))
            assert {draw.epoch for draw in one} == {epoch}


def test_epochs_have_orders_of_their_own() -> None:
    order = MixtureOrder([1], [40], seed=3)
    epochs = [tuple(order[i].window for i in range(40 * e, 40 * e + 40)) for e in range(4)]
    assert len(set(epochs)) == 4


def test_another_seed_is_another_order_with_the_same_counts() -> None:
    one, other = (MixtureOrder([5, 3], [100, 100], seed=seed) for seed in (1, 2))
    n = one.block * 10
    assert [one[i] for i in range(n)] != [other[i] for i in range(n)]
    assert Counter(one[i].source for i in range(n)) == Counter(other[i].source for i in range(n))


def test_only_the_ratio_of_weights_counts() -> None:
    one, other = MixtureOrder([2, 6], [9, 9], seed=1), MixtureOrder([Fraction(1, 4), Fraction(3, 4)], [9, 9], seed=1)
    assert [one[i] for i in range(100)] == [other[i] for i in range(100)]


def test_samples_far_out_cost_no_more_and_stay_exact() -> None:
    order = MixtureOrder([7, 2, 1], [10**9, 10**6, 3], seed=28)
    n = 3_662_109_375
    counts = order.drawn(n)
    assert sum(counts) == n
    assert all(abs(count - n * share) < order.discrepancy(j) for j, (count, share) in enumerate(zip(counts, order.shares, strict=True)))
    assert order[n].epoch == order[n].draw // [10**9, 10**6, 3][order[n].source]


def test_the_order_is_fixed_for_ever() -> None:
    # A change of these numbers changes the data that every stored run has seen.
    order = MixtureOrder([3, 1], [10, 10], seed=28)
    assert [(order[i].source, order[i].window) for i in range(8)] == [(0, 9), (0, 7), (1, 1), (0, 6), (0, 1), (0, 3), (0, 8), (1, 4)]


@pytest.mark.parametrize(
    ("weights", "windows", "message"),
    [([], [], "one weight"), ([1], [1, 2], "not 1 and 2"), ([1, 0], [3, 3], "source 1 has weight 0"), ([1], [0], "source 0 has 0 windows")],
)
def test_mixtures_that_cannot_be_drawn_are_refused(weights: list[int], windows: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MixtureOrder(weights, windows, seed=1)
