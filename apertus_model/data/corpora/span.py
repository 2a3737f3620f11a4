"""Reads the output of the filter tasks of a span, with the later verdicts on each document.

Invariants:
- Files of the store are read from their beginning to their end, a few thousand documents at a time.
- `gone` is the first step over the whole source that drops a document; later steps do not see it.
- Memory: the verdicts on the documents of the span (16 bytes for each that is dropped), and a few
  thousand documents.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import BinaryIO, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from apertus_model.data.corpora.exchange import read_cell
from apertus_model.data.corpora.records import column, read_records
from apertus_model.data.corpora.verdicts import VERDICTS
from apertus_model.data.tokens.megatron import HEADER_BYTES, TokenFileError, read_header
from infra.store import Attempt, StoreError
from infra.store.documents import Unit
from infra.store.files.reader import CheckedFile


def unit_of(attempt: Attempt, key: str) -> Unit:
    """A unit of an earlier pass."""
    if (unit := attempt.unit(key)) is None:
        raise StoreError(f"unit {key} of {attempt.job.path} is gone; run the stage again")
    return unit


def unit_file(attempt: Attempt, key: str, name: str) -> CheckedFile:
    """A file of a unit of an earlier pass, for reading from the store."""
    record = unit_of(attempt, key).files[name]
    return attempt.store.reader(record.path, record)


def unit_files(attempt: Attempt, keys: list[str], name: str) -> Iterator[CheckedFile]:
    """The file `name` of each unit, one after the other, since a pass may have thousands of units."""
    return (unit_file(attempt, key, name) for key in keys)


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


class SpanReader:
    """The documents of a span.

    Args:
        steps: the steps over the whole source that are decided; NUMBERED for the numbers of copies.
        ranges: number of ranges of texts over which they were decided. spans: number of spans.
        count: number of steps of the spec.
    """

    NUMBERED = -1

    def __init__(
        self,
        attempt: Attempt,
        tasks: list[str],
        number: int,
        spans: int,
        steps: list[int],
        ranges: int,
        count: int,
    ) -> None:
        self._attempt = attempt
        self._tasks = tasks
        self._count = count
        self._verdicts: dict[int, tuple[NDArray[np.int64], NDArray[np.uint64]]] = {}
        for step in steps:
            keys = [resolve_key(step, one) for one in range(ranges)]
            table = read_cell(unit_files(attempt, keys, "verdicts-00000"), VERDICTS, spans, number)
            places, values = column(table, "place"), column(table, "value")
            order = np.argsort(places)
            self._verdicts[step] = places[order], values[order]

    def __iter__(self) -> Iterator[Batch]:
        return self.read(None)

    def read(self, columns: list[str] | None) -> Iterator[Batch]:
        """All documents, with some columns of their records."""
        place = 0
        for key in self._tasks:
            unit = unit_of(self._attempt, key)
            files = {
                name: self._attempt.store.reader(record.path, record) for name, record in unit.files.items()
            }
            tokens = TaskTokens(files["tokens.bin"], files["tokens.idx"])
            for records in read_records(files["documents.parquet"].stream(), columns):
                yield self._batch(records, place, tokens)
                place += records.num_rows
            if tokens.left:
                raise TokenFileError(f"{files['tokens.bin'].name} has more documents than the task's table")

    def _batch(self, records: pa.RecordBatch, place: int, tokens: TaskTokens) -> Batch:
        rows = records.num_rows
        gone, value = np.full(rows, -1, np.int16), np.zeros(rows, np.uint64)
        copy = np.zeros(rows, np.uint32)
        for step, (places, values) in self._verdicts.items():
            some = slice(*np.searchsorted(places, [place, place + rows]))
            at = places[some] - place
            if step == self.NUMBERED:
                copy[at] = values[some]
            else:
                gone[at], value[at] = step, values[some]
        step_ = column(records, "step")
        tokenised = step_ == self._count
        sizes = np.full(rows, -1, np.int64)
        sizes[tokenised] = tokens.sizes(int(tokenised.sum()))
        return Batch(records, place, step_, gone, value, copy, sizes, tokens)


def resolve_key(step: int, number: int) -> str:
    return f"resolve-{step_name(step)}-{number:05d}"


def step_name(step: int) -> str:
    return "copies" if step == SpanReader.NUMBERED else f"{step:02d}"


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
