"""Exchanges rows between the units of one pass and those of the next: the former sort them into cells, the
latter read them cell by cell.

A unit writes a file for each group of cells (`CellWriter`). The file has the rows of its first cell, then
those of the next one, as Arrow record batches, and at the end the offsets of the cells: (cells + 1,) int64.

Invariants:
- A writer that holds `memory` bytes of rows spills them to local disk, sorted by cell, for which it needs as
  much memory again. The spills are joined at the end.
- A cell is one range of bytes of a file, so a reader asks each file for its offsets and for one range.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from infra.store.files.reader import RangeFile

OFFSET = np.dtype("<i8")
CHUNK = 2**22


class CellWriter:
    """A writer that sorts rows into the cells of `<folder>/<name>-<group>`; group g has the cells
    [borders[g], borders[g + 1]). `memory`: bytes of rows to hold."""

    def __init__(
        self, folder: Path, name: str, schema: pa.Schema, borders: Sequence[int], memory: int
    ) -> None:
        self._folder, self._name = folder, name
        self._schema, self._borders, self._memory = schema, list(borders), memory
        self._held: list[tuple[pa.Table, NDArray[np.int64]]] = []
        self._bytes = 0
        self._spill = folder / f"{name}.spill"
        self._spilled: list[NDArray[np.int64]] = []  # of each spill, where its cells begin: (cells + 1,)

    def add(self, table: pa.Table, cells: NDArray[np.int64]) -> None:
        """Adds rows, with the cell of each, (rows,)."""
        if not table.num_rows:
            return
        self._held.append((table, cells))
        self._bytes += table.nbytes
        if self._bytes >= self._memory:
            self._spill_held()

    def close(self) -> dict[str, Path]:
        """Writes the files and returns them by name; a group without rows has a file too."""
        files: dict[str, Path] = {}
        if self._spilled:
            self._spill_held()
        pieces = self._from_disk() if self._spilled else self._from_memory()
        for group, (first, end) in enumerate(pairwise(self._borders)):
            name = f"{self._name}-{group:05d}"
            files[name] = self._folder / name
            offsets = np.zeros(end - first + 1, OFFSET)
            with files[name].open("wb") as file:
                for cell in range(first, end):
                    for piece in next(pieces):
                        file.write(piece)
                    offsets[cell - first + 1] = file.tell()
                file.write(offsets.tobytes())
        self._spill.unlink(missing_ok=True)
        return files

    def _sorted(self) -> tuple[pa.Table, NDArray[np.int64]]:
        """Removes and returns the held rows, sorted by cell, and the start of each cell: (cells + 1,)."""
        table = pa.concat_tables([self._schema.empty_table(), *(table for table, _ in self._held)])
        cells = np.concatenate([np.empty(0, np.int64), *(cells for _, cells in self._held)])
        self._held, self._bytes = [], 0
        order = np.argsort(cells, kind="stable")
        starts = np.searchsorted(cells[order], np.arange(self._borders[-1] + 1))
        return table.take(pa.array(order)).combine_chunks(), starts

    def _from_memory(self) -> Iterator[list[pa.Buffer]]:
        """The serialised rows of each cell, in turn."""
        table, starts = self._sorted()
        for cell in range(self._borders[-1]):
            start, stop = int(starts[cell]), int(starts[cell + 1])
            rows = table.slice(start, stop - start)
            yield [batch.serialize() for batch in rows.to_batches()] if stop > start else []

    def _spill_held(self) -> None:
        offsets = np.zeros(self._borders[-1] + 1, np.int64)
        with self._spill.open("ab") as file:
            offsets[0] = file.tell()
            for cell, pieces in enumerate(self._from_memory()):
                for piece in pieces:
                    file.write(piece)
                offsets[cell + 1] = file.tell()
        self._spilled.append(offsets)

    def _from_disk(self) -> Iterator[list[bytes]]:
        """The serialised rows of each cell, in turn: one piece from each spill."""
        with self._spill.open("rb") as file:
            for cell in range(self._borders[-1]):
                pieces = []
                for offsets in self._spilled:
                    file.seek(offsets[cell])
                    pieces.append(file.read(offsets[cell + 1] - offsets[cell]))
                yield pieces


def read_cells(files: Iterable[RangeFile], schema: pa.Schema, cells: int, first: int, end: int) -> pa.Table:
    """The rows of the cells [first, end) of a group of `cells` cells, file by file."""
    batches: list[pa.RecordBatch] = []
    for file in files:
        at = file.size - (cells + 1) * OFFSET.itemsize
        offsets = file.read(at + first * OFFSET.itemsize, at + (end + 1) * OFFSET.itemsize)
        start, *_, stop = np.frombuffer(offsets, OFFSET).tolist()
        if stop == start:
            continue
        stream = pa.BufferReader(file.read(start, stop))
        while stream.tell() < stop - start:
            batches.append(pa.ipc.read_record_batch(pa.ipc.read_message(stream), schema))
    return pa.Table.from_batches(batches, schema)


def cell_of(keys: NDArray[np.uint64], cells: int) -> NDArray[np.int64]:
    """The cell of each key, of `cells` equal ranges of keys. Cell c of n x m is in cell c // m of n."""
    assert cells <= 2**31
    return (((keys >> np.uint64(32)) * np.uint64(cells)) >> np.uint64(32)).astype(np.int64)


def cell_borders(cells: int, cell: int) -> tuple[int, int]:
    """The range of the keys of a cell: [first, end)."""
    low, high = (-(-(index << 32) // cells) << 32 for index in (cell, cell + 1))
    return low, min(high, 2**64)
