"""Reads the output of the filter tasks of a span, with the later verdicts on each document.

Invariants:
- Files of the store are read from their beginning to their end, a few thousand documents at a time.
- `gone` is the first step over the whole source that drops a document; later steps do not see it.
- Memory: the verdicts on the documents of the span (16 bytes for each that is dropped), and a few
  thousand documents.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import BinaryIO, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from apertus_model.data.corpora.keys import NUMBERED
from apertus_model.data.corpora.records import column, read_records
from apertus_model.data.tokens.megatron import HEADER_BYTES, TokenFileError, read_header
from infra.store.files.reader import CheckedFile


class TaskTokens:
    """The tokens of a task, in order."""

    def __init__(self, data: CheckedFile, index: CheckedFile) -> None:
        self._name = data.name
        self._data: BinaryIO = data.stream()
        self._index: BinaryIO = index.stream()
        header = read_header(self._index.read(HEADER_BYTES), index.name)
        self.dtype = header.dtype
        self.left = header.sequences

    def sizes(self, count: int) -> NDArray[np.int64]:
        """The sizes of the next `count` documents, in tokens."""
        self.left -= count
        sizes = np.frombuffer(self._index.read(4 * count), "<i4").astype(np.int64)
        if self.left < 0 or len(sizes) < count:
            raise TokenFileError(f"{self._name} has fewer documents than the task's table says")
        return sizes

    def read(self, tokens: int) -> NDArray[np.integer]:
        """The next tokens."""
        data = self._data.read(tokens * self.dtype.itemsize)
        return np.frombuffer(data, self.dtype)


class Batch(NamedTuple):
    """Consecutive documents of a task."""

    records: pa.RecordBatch
    place: int  # of the first document, among the documents of the span
    step: NDArray[np.int16]  # the step that dropped it in its task, or the number of steps
    gone: NDArray[np.int16]  # the step over the whole source that dropped it, or -1
    value: NDArray[np.uint64]  # the value of that step's verdict
    copy: NDArray[np.uint32]  # its number among equal texts
    sizes: NDArray[np.int64]  # in tokens; -1 if the document was not tokenised
    tokens: TaskTokens  # the next ones to read are those of the batch


class SpanVerdicts(NamedTuple):
    """What a step over the whole source decided about documents of a span."""

    places: NDArray[np.int64]  # (documents,), ascending
    values: NDArray[np.uint64]  # (documents,), as in `VERDICTS`


def read_span(
    tasks: Iterable[Mapping[str, CheckedFile]],
    verdicts: Mapping[int, SpanVerdicts],
    steps: int,
    columns: list[str] | None,
) -> Iterator[Batch]:
    """The documents of a span.

    Args:
        tasks: the files of its tasks, in order.
        verdicts: by step; those of `NUMBERED` are the numbers of copies.
        steps: number of steps of the spec.
        columns: those of the records that are read; None for all.
    """
    place = 0
    for files in tasks:
        tokens = TaskTokens(files["tokens.bin"], files["tokens.idx"])
        for records in read_records(files["documents.parquet"].stream(), columns):
            yield _batch(records, place, tokens, verdicts, steps)
            place += records.num_rows
        if tokens.left:
            raise TokenFileError(f"{files['tokens.bin'].name} has more documents than the task's table")


def _batch(
    records: pa.RecordBatch, place: int, tokens: TaskTokens, verdicts: Mapping[int, SpanVerdicts], steps: int
) -> Batch:
    rows = records.num_rows
    gone, value = np.full(rows, -1, np.int16), np.zeros(rows, np.uint64)
    copy = np.zeros(rows, np.uint32)
    for step, (places, values) in verdicts.items():
        own = slice(*np.searchsorted(places, [place, place + rows]))
        at = places[own] - place
        if step == NUMBERED:
            copy[at] = values[own]
        else:
            gone[at], value[at] = step, values[own]
    dropped_by = column(records, "step")
    tokenised = dropped_by == steps
    sizes = np.full(rows, -1, np.int64)
    sizes[tokenised] = tokens.sizes(int(tokenised.sum()))
    return Batch(records, place, dropped_by, gone, value, copy, sizes, tokens)


def blocks(
    batch: Batch, memory: int
) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.integer]]]:
    """The tokenised documents of a batch, as many at a time as have their tokens in `memory` bytes, and at
    least one: their rows in the batch, their sizes, and their tokens back to back."""
    rows = np.flatnonzero(batch.sizes >= 0)
    sizes = batch.sizes[rows]
    ends = np.cumsum(sizes)
    start = 0
    while start < len(rows):
        before = int(ends[start - 1]) if start else 0
        most = before + memory // batch.tokens.dtype.itemsize
        stop = max(start + 1, int(np.searchsorted(ends, most, side="right")))
        yield rows[start:stop], sizes[start:stop], batch.tokens.read(int(ends[stop - 1]) - before)
        start = stop
