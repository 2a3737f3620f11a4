"""Shares of a mixture are exact, also while they change."""

from __future__ import annotations

from fractions import Fraction
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specs.stages.mixture import between, exact, integers

shares = st.dictionaries(st.sampled_from("abcd"), st.fractions(Fraction(1, 9), 9), min_size=1)


@pytest.mark.parametrize(
    ("weights", "expected"),
    [
        ([0.7, 0.2, 0.1], [7, 2, 1]),
        ([2.0, 4.0], [1, 2]),
        ([1e-06, 1.0], [1, 10**6]),
        ([0.333, 1.0], [333, 1000]),
    ],
)
def test_weights_are_what_is_written_in_decimal(weights: list[float], expected: list[int]) -> None:
    assert integers([exact(weight) for weight in weights]) == expected


@given(shares, shares, st.integers(1, 20))
def test_the_pieces_of_an_anneal_are_on_the_line_and_come_to_its_mean(
    begin: dict[str, Fraction], end: dict[str, Fraction], n: int
) -> None:
    pieces = [between(begin, end, Fraction(2 * k + 1, 2 * n)) for k in range(n)]
    assert all(sum(piece.values()) == 1 for piece in pieces)
    for name in {*begin, *end}:
        first, last = (weights.get(name, Fraction(0)) / sum(weights.values()) for weights in (begin, end))
        assert sum(piece.get(name, Fraction(0)) for piece in pieces) / n == (first + last) / 2
        steps = {b.get(name, Fraction(0)) - a.get(name, Fraction(0)) for a, b in pairwise(pieces)}
        assert steps <= {(last - first) / n}
