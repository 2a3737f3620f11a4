"""Packing of sequences into rows of equal length: their assignment, and the content of a row.

Invariants: the rows are a function of the lengths and the capacity alone; every item is in exactly one row;
no row exceeds its capacity. Sequences of a row do not see each other.

Best-fit decreasing (Johnson 1973): the longest item first, into the fullest row that has room for it. Items
of one length are placed together and rows with equal room are interchangeable, so the work grows with the
number of different lengths and rooms, not of items: about a second for a million.
"""

import shutil
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from apertus_model.data.tokens.stream import IGNORE_INDEX


def pack(lengths: NDArray[np.int64], capacity: int) -> list[NDArray[np.int64]]:
    """Rows of item indices, each ascending, whose lengths sum to at most `capacity`; see `assign_rows`."""
    if not len(lengths):
        return []
    by_row, starts = by_rows(assign_rows(lengths, capacity))
    return np.split(by_row, starts[1:-1])


def assign_rows(lengths: NDArray[np.int64], capacity: int) -> NDArray[np.int64]:
    """The row of each item: (items,), int64, rows counted from 0 without gaps. Memory: about 50 bytes per
    item. ValueError for a length that is not from 1 to `capacity`: the caller must drop or cut such items."""
    lengths = np.asarray(lengths, dtype=np.int64)
    if not lengths.size:
        return np.empty(0, dtype=np.int64)
    if not 1 <= lengths.min() <= lengths.max() <= capacity:
        bounds = f"items of {lengths.min()} to {lengths.max()} do not fit into rows of capacity {capacity}"
        raise ValueError(f"{bounds}; 1 to {capacity} do")
    order = np.argsort(-lengths, kind="stable")
    values, starts = np.unique(-lengths[order], return_index=True)
    ends = [*starts[1:].tolist(), lengths.size]
    rows = _Rows(capacity)
    row_of = np.empty(lengths.size, dtype=np.int64)
    for value, start, end in zip((-values).tolist(), starts.tolist(), ends, strict=True):
        row_of[order[start:end]] = rows.place(value, end - start)
    return row_of


def by_rows(row_of: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The items row by row, ascending: (items,), int64; the start of each row, and the end: (rows + 1,)."""
    items = np.argsort(row_of, kind="stable")
    return items, np.concatenate([[0], np.flatnonzero(np.diff(row_of[items])) + 1, [row_of.size]])


class _Rows:
    """The rows, grouped by their remaining room."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._number = 0
        self._with_room: dict[int, list[NDArray[np.int64]]] = defaultdict(list)
        self._counts = np.zeros(capacity + 1, dtype=np.int64)

    def place(self, length: int, count: int) -> NDArray[np.int64]:
        """Places `count` items of one length and returns the row of each: (count,), int64."""
        placed: list[NDArray[np.int64]] = []
        while count:
            room = length + int(np.argmax(self._counts[length:] > 0))
            if self._counts[room]:
                each = room // length
                rows = self._take(room, -(-count // each))
            else:
                room, each = self._capacity, self._capacity // length
                rows = np.arange(self._number, self._number - (-count // each), dtype=np.int64)
                self._number += rows.size
            # Every row takes as many items as fit; the last one takes the rest.
            placed_now = min(count, rows.size * each)
            in_last = placed_now - (rows.size - 1) * each
            placed.append(np.repeat(rows, each)[:placed_now])
            self._put(room - each * length, rows[:-1])
            self._put(room - in_last * length, rows[-1:])
            count -= placed_now
        return np.concatenate(placed)

    def _put(self, room: int, rows: NDArray[np.int64]) -> None:
        if room and rows.size:
            self._with_room[room].append(rows)
            self._counts[room] += rows.size

    def _take(self, room: int, most: int) -> NDArray[np.int64]:
        """Removes and returns up to `most` rows with this room, the most recently added first."""
        chosen: list[NDArray[np.int64]] = []
        stack = self._with_room[room]
        while stack and most:
            rows = stack.pop()
            if rows.size > most:
                stack.append(rows[most:])
                rows = rows[:most]
            chosen.append(rows)
            most -= rows.size
        rows_with_room = np.concatenate(chosen)
        self._counts[room] -= rows_with_room.size
        return rows_with_room


class PackedRow(NamedTuple):
    input: NDArray[np.int64]  # (length,)
    labels: NDArray[np.int64]  # (length,), IGNORE_INDEX where nothing is trained
    positions: NDArray[np.int64]  # (length,)
    starts: list[int]  # first position of each of its sequences


def fill_row(
    sequences: Sequence[tuple[NDArray[np.int64], NDArray[np.bool_]]], length: int, pad_id: int
) -> PackedRow:
    """Lays sequences one after the other in a row of `length` tokens; none sees another: positions restart at
    each sequence, and in the padding at the end of the row. `sequences`: (tokens, trained) of each, both
    (n,); a label is the next token of the same sequence if that token is trained."""
    inputs = np.full(length, pad_id, dtype=np.int64)
    labels = np.full(length, IGNORE_INDEX, dtype=np.int64)
    positions = np.empty(length, dtype=np.int64)
    starts: list[int] = []
    begin = 0
    for tokens, trained in sequences:
        end = begin + tokens.size
        inputs[begin:end] = tokens
        labels[begin : end - 1] = np.where(trained[1:], tokens[1:], IGNORE_INDEX)
        positions[begin:end] = np.arange(tokens.size)
        starts.append(begin)
        begin = end
    positions[begin:] = np.arange(length - begin)
    return PackedRow(inputs, labels, positions, starts)


def complete_array(raw: Path, target: Path, dtype: np.dtype) -> None:
    """Turns a file of raw values into an .npy file without holding them in memory."""
    with raw.open("rb") as values, target.open("wb") as file:
        shape = (raw.stat().st_size // dtype.itemsize,)
        header = {"descr": dtype.str, "fortran_order": False, "shape": shape}
        np.lib.format.write_array_header_1_0(file, header)
        shutil.copyfileobj(values, file)
    raw.unlink()


def load_array(path: Path) -> NDArray[Any]:
    """An .npy file, mapped into memory; never unpickled."""
    # A plain ndarray over the map: slices of np.memmap are much slower to make.
    return np.asarray(np.load(path, mmap_mode="r", allow_pickle=False))
