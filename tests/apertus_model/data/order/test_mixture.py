from __future__ import annotations

import math
import pickle
from collections import Counter
from fractions import Fraction
from itertools import pairwise

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from apertus_model.data.order.mixture import BLOCK, MixtureOrder
from tests.numerics import Numerics

weights_of_sources = st.lists(
    st.one_of(st.integers(1, 10), st.integers(1, 10**13), st.fractions(Fraction(1, 1000), 50)),
    min_size=1,
    max_size=40,
)


@settings(max_examples=60)
@given(weights_of_sources, st.integers(0, 10**12), st.integers(0, 2**31))
def test_counts_follow_the_weights_within_the_stated_bounds(
    numerics: Numerics, weights: list[int | Fraction], begin: int, seed: int
) -> None:
    order = MixtureOrder(weights, [10] * len(weights), seed)
    assert sum(order.shares) == 1
    bounds = [order.discrepancy(source) for source in range(len(weights))]  # 0 for a single source
    at_borders = [order.border_error(source) for source in range(len(weights))]
    exact = [*order.shares, *bounds, *at_borders]
    scale = math.lcm(*(Fraction(value).denominator for value in exact))  # whole numbers are faster
    shares, most, at_border = (
        [int(value * scale) for value in values] for values in (order.shares, bounds, at_borders)
    )
    counts = order.drawn(begin)
    worst = [0] * len(weights)
    for i in range(begin, begin + 2 * BLOCK + 3):
        differences = [abs(count * scale - i * share) for count, share in zip(counts, shares, strict=True)]
        worst = [max(pair) for pair in zip(worst, differences, strict=True)]
        if i % BLOCK == 0:
            assert all(found <= limit for found, limit in zip(differences, at_border, strict=True))
        counts[order[i].source] += 1
    assert all(found <= limit for found, limit in zip(worst, most, strict=True))
    numerics(
        "data",
        "samples drawn of a source, as a share of the stated bound",
        source="apertus_model/data/order/mixture.py",
        against="n w in rational numbers, after every sample; hypothesis over weights and n up to 1e12",
        difference=float(max(Fraction(a, b or scale) for a, b in zip(worst, most, strict=True))),
        allowed=1.0,
    )
    assert order.drawn(begin + 2 * BLOCK + 3) == counts


@settings(max_examples=60)
@given(weights_of_sources, st.integers(0, 10**13))
def test_shares_are_within_a_thousandth_over_any_100_000_samples(
    weights: list[int | Fraction], begin: int
) -> None:
    order = MixtureOrder(weights, [10] * len(weights), seed=28)
    before, after = order.drawn(begin), order.drawn(begin + 100_000)
    for source, share in enumerate(order.shares):
        assert 2 * order.discrepancy(source) <= 100  # so it holds for every beginning, not for this one alone
        assert abs(after[source] - before[source] - 100_000 * share) <= 100


@settings(max_examples=30)
@given(
    st.lists(st.tuples(st.integers(1, 9), st.integers(1, 200)), min_size=1, max_size=6), st.integers(0, 10**6)
)
def test_the_first_samples_draw_the_first_windows_of_each_source_and_each_pass_is_a_permutation(
    sources: list[tuple[int, int]], seed: int
) -> None:
    windows = [count for _, count in sources]
    order = MixtureOrder([weight for weight, _ in sources], windows, seed)
    seen: list[list[int]] = [[] for _ in sources]
    for i in range(700):
        draw = order[i]
        assert draw.draw == len(seen[draw.source])
        assert draw.epoch == draw.draw // windows[draw.source]
        seen[draw.source].append(draw.window)
    for source, count in enumerate(windows):
        for begin, end in pairwise(range(0, len(seen[source]), count)):
            assert sorted(seen[source][begin:end]) == list(range(count))


def test_each_epoch_has_another_order() -> None:
    order = MixtureOrder([1], [40], seed=3)
    epochs = [tuple(order[i].window for i in range(40 * e, 40 * e + 40)) for e in range(4)]
    assert len(set(epochs)) == 4


def test_sources_are_spread_and_not_only_counted() -> None:
    order = MixtureOrder([1, 1], [10, 10], seed=3)
    runs = [order[i].source == order[i + 1].source for i in range(100 * BLOCK)]
    # a fair draw without replacement repeats a little less than half of the time
    assert 0.45 < sum(runs) / len(runs) < 0.53
    assert len({tuple(order[b * BLOCK + i].source for i in range(BLOCK)) for b in range(50)}) == 50


def test_another_seed_is_another_order_with_the_same_counts() -> None:
    one, other = (MixtureOrder([5, 3], [100, 100], seed=seed) for seed in (1, 2))
    n = BLOCK * 10
    assert [one[i] for i in range(n)] != [other[i] for i in range(n)]
    assert Counter(one[i].source for i in range(n)) == Counter(other[i].source for i in range(n))


def test_only_the_ratio_of_weights_counts() -> None:
    one, other = (
        MixtureOrder([2, 6], [9, 9], seed=1),
        MixtureOrder([Fraction(1, 4), Fraction(3, 4)], [9, 9], seed=1),
    )
    assert [one[i] for i in range(100)] == [other[i] for i in range(100)]


def test_mixture_after_another_continues_in_the_same_order_of_windows() -> None:
    sizes = {"web": 300, "code": 200, "math": 100}
    first = MixtureOrder([3, 2], [sizes["web"], sizes["code"]], 28, keys=["web", "code"])
    n = 333
    web, code = first.drawn(n)
    second = MixtureOrder(
        [1, 1, 2],
        [sizes["code"], sizes["math"], sizes["web"]],
        28,
        keys=["code", "math", "web"],
        starts=[code, 0, web],
    )
    seen = Counter(
        ("web" if draw.source == 0 else "code", draw.window) for draw in (first[i] for i in range(n))
    )
    m = 150
    seen.update((second.keys[draw.source], draw.window) for draw in (second[i] for i in range(m)))
    assert max(seen.values()) == 1
    whole = MixtureOrder([1], [sizes["web"]], 28, keys=["web"])
    together = web + second.drawn(m)[2]
    assert {window for key, window in seen if key == "web"} == {whole[i].window for i in range(together)}


def test_distant_samples_are_exact_at_the_same_cost() -> None:
    order = MixtureOrder([7, 2, 1], [10**9, 10**6, 3], seed=28)
    n = 3_662_109_375
    counts = order.drawn(n)
    assert sum(counts) == n
    assert all(
        abs(count - n * share) < order.discrepancy(j)
        for j, (count, share) in enumerate(zip(counts, order.shares, strict=True))
    )
    assert order[n].epoch == order[n].draw // [10**9, 10**6, 3][order[n].source]


def test_an_order_travels_between_processes() -> None:
    order = MixtureOrder([7, 2, 1], [50, 60, 70], seed=28, keys=["a", "b", "c"], starts=[0, 5, 9])
    there = pickle.loads(pickle.dumps(order))
    assert [there[i] for i in range(300)] == [order[i] for i in range(300)]


def test_the_order_is_fixed_for_ever() -> None:
    # A change of these numbers changes the data that every stored run has seen.
    order = MixtureOrder([3, 1], [10, 10], seed=28, keys=["a", "b"])
    assert [(order[i].source, order[i].window) for i in range(8)] == [
        (0, 8),
        (0, 3),
        (0, 2),
        (0, 1),
        (0, 0),
        (0, 4),
        (1, 9),
        (0, 5),
    ]


def test_halving_is_exact_at_the_borders_of_equal_shares() -> None:
    # 4 sources of a quarter each: BLOCK is a multiple of 4, so nothing is rounded at any border.
    order = MixtureOrder([1, 1, 1, 1], [5] * 4, seed=0)
    assert [order.drawn(BLOCK * k) for k in range(4)] == [[BLOCK * k // 4] * 4 for k in range(4)]
    assert np.isclose(float(order.discrepancy(0)), BLOCK * 3 / 16 + 0.75 * (1 + 1.5))
