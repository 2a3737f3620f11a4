from __future__ import annotations

import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from apertus_model.data.tokens.packing import pack


def _best_fit_decreasing(lengths: list[int], capacity: int) -> list[int]:
    """What is left in each row, by the definition: item by item, the longest first, into the fullest row
    that has room."""
    rooms: list[int] = []
    for length in sorted(lengths, reverse=True):
        fitting = [row for row, room in enumerate(rooms) if room >= length]
        if fitting:
            rooms[min(fitting, key=lambda row: rooms[row])] -= length
        else:
            rooms.append(capacity - length)
    return sorted(rooms)


@settings(max_examples=200)
@given(
    st.integers(1, 40).flatmap(
        lambda capacity: st.tuples(st.lists(st.integers(1, capacity), max_size=80), st.just(capacity))
    )
)
def test_every_item_is_in_one_row_and_the_rows_are_those_of_best_fit_decreasing(
    case: tuple[list[int], int],
) -> None:
    lengths, capacity = case
    rows = pack(np.array(lengths, dtype=np.int64), capacity)
    assert sorted(index for row in rows for index in row.tolist()) == list(range(len(lengths)))
    assert all(row.tolist() == sorted(row.tolist()) for row in rows)
    assert sorted(capacity - sum(lengths[index] for index in row) for row in rows) == _best_fit_decreasing(
        lengths, capacity
    )


def test_realistic_lengths_fill_the_rows_within_seconds() -> None:
    lengths = np.clip(np.exp(np.random.default_rng(0).normal(6.3, 1.0, 200_000)).astype(np.int64), 20, 4096)
    begun = time.perf_counter()
    rows = pack(lengths, 4096)
    assert time.perf_counter() - begun < 10
    assert lengths.sum() / (len(rows) * 4096) > 0.999


def test_items_that_fit_nowhere_are_refused_with_the_numbers() -> None:
    with pytest.raises(ValueError, match=r"items of 3 to 9 do not fit into rows of capacity 8"):
        pack(np.array([3, 9]), 8)
    with pytest.raises(ValueError, match="items of 0 to 2"):
        pack(np.array([0, 2]), 8)
    assert pack(np.array([], dtype=np.int64), 8) == []
