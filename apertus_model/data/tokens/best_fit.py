"""Best-fit packing of a corpus (arXiv 2404.10830): whole documents in rows of one length, computed once.

A folder of rows holds, as .npy files (little endian, memory-mapped when read):

    rows.npy      (rows + 1,), int64: the first piece of each row, and the end
    begins.npy    (pieces,), int64: the first token of each piece in the stream of the split, its shards one
                  after the other
    lengths.npy   (pieces,), int32: its tokens, at most L

Invariants:
- A document of up to L tokens is one piece. A longer one is cut into pieces of L tokens (the last one
  shorter), each of which begins with the last token of the one before it, so that every token of a document
  but its first is a label exactly once. No token is dropped.
- Every piece is in one row. Pieces of a row are in stored order; positions restart, and none sees another.
- Rows are packed shard by shard: memory is about 100 bytes for each document of one shard.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from apertus_model.data.tokens.goldfish import goldfish_mask
from apertus_model.data.tokens.packing import assign_rows, by_rows, complete_array, fill_row, load_array
from apertus_model.data.tokens.stream import IGNORE_INDEX, Sample, TokenStream
from infra.store import Artifact, StoreError
from specs.settings import Goldfish

TABLES: dict[str, np.dtype[Any]] = {
    "rows": np.dtype("<i8"),
    "begins": np.dtype("<i8"),
    "lengths": np.dtype("<i4"),
}


class Packed(NamedTuple):
    """The counts of a packed split."""

    documents: int  # of the split
    tokens: int  # of the split
    rows: int
    pieces: int
    cut_documents: int  # documents longer than a row
    cropped_tokens: int  # tokens of these documents
    padding: int  # unused places of the rows
    cut_by_windows: int  # documents that concatenate and split would cut
    cropped_by_windows: int  # tokens of these documents


def pack_shard(
    sizes: NDArray[np.int32], length: int
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int32]]:
    """Packs the documents of one shard in rows of `length` >= 2 tokens; empty documents are in no row.
    `sizes`: (documents,), in tokens. Returns the first piece of each row, (rows,), then the first token and
    the number of tokens of each piece, row by row, (pieces,) each."""
    sizes64 = sizes.astype(np.int64)
    starts = np.cumsum(sizes64) - sizes64
    # Each further piece adds L - 1 tokens, since it repeats the last token of the one before.
    pieces = np.where(sizes64 > length, 1 + -(-(sizes64 - length) // (length - 1)), np.minimum(sizes64, 1))
    document = np.repeat(np.arange(sizes64.size), pieces)
    number = np.arange(document.size) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    offsets = number * (length - 1)
    lengths = np.minimum(sizes64[document] - offsets, length)
    order, rows = by_rows(assign_rows(lengths, length))
    return rows[:-1], (starts[document] + offsets)[order], lengths[order].astype(np.int32)


class RowsWriter:
    """Packs a split shard by shard into a folder; `close` completes the files and counts."""

    def __init__(self, folder: Path, length: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._length = length
        self._parts: dict[str, IO[bytes]] = {name: (folder / f"{name}.part").open("wb") for name in TABLES}
        self._counts = Counter(dict.fromkeys(Packed._fields, 0))

    def add(self, sizes: NDArray[np.int32]) -> None:
        """Packs the next shard, given the sizes of its documents: (documents,), int32."""
        rows, begins, lengths = pack_shard(sizes, self._length)
        self._write("rows", rows + self._counts["pieces"])
        self._write("begins", begins + self._counts["tokens"])
        self._write("lengths", lengths)
        sizes64 = sizes.astype(np.int64)
        ends = np.cumsum(sizes64) + self._counts["tokens"]
        windows = (ends - sizes64) // self._length != (ends - 1) // self._length  # a window ends inside
        longer = sizes64 > self._length
        self._counts.update(
            documents=sizes64.size,
            tokens=int(sizes64.sum()),
            rows=rows.size,
            pieces=begins.size,
            cut_documents=int(longer.sum()),
            cropped_tokens=int(sizes64[longer].sum()),
            padding=rows.size * self._length - int(lengths.sum(dtype=np.int64)),
            cut_by_windows=int(windows[sizes64 > 0].sum()),
            cropped_by_windows=int(sizes64[windows].sum()),
        )

    def close(self) -> Packed:
        self._write("rows", np.array([self._counts["pieces"]]))
        for name, part in self._parts.items():
            part.close()
            complete_array(self._folder / f"{name}.part", self._folder / f"{name}.npy", TABLES[name])
        return Packed(**self._counts)

    def _write(self, name: str, values: NDArray[np.integer]) -> None:
        self._parts[name].write(values.astype(TABLES[name]).tobytes())


def packed_tables(artifact: Artifact) -> dict[str, Path]:
    """The files of an artifact of kind `packing`, with checked content, for `MixtureSamples.open`."""
    return {name: artifact.local(f"{name}.npy") for name in TABLES}


class PackedRows:
    """The rows of a source as training sequences. Picklable. StoreError for tables of another stream."""

    def __init__(
        self,
        stream: TokenStream,
        tables: Mapping[str, Path],
        length: int,
        eos_id: int,
        goldfish: Goldfish | None,
    ) -> None:
        self._stream, self._tables = stream, dict(tables)
        self._length, self._eos_id, self._goldfish = length, eos_id, goldfish
        self._rows, self._begins, self._lengths = (load_array(tables[name]) for name in TABLES)
        pieces, beyond = self._begins.size, self._begins[-1:] >= len(stream)
        if self._lengths.size != pieces or self._rows[-1] != pieces or beyond.any():
            raise StoreError(
                f"{tables['rows']} is not of a stream of {len(stream)} tokens; delete its artifact to have it"
                " made again"
            )

    def __reduce__(self) -> tuple[Any, ...]:
        return PackedRows, (self._stream, self._tables, self._length, self._eos_id, self._goldfish)

    def __len__(self) -> int:
        return self._rows.size - 1

    def pieces(self, row: int) -> Iterator[tuple[int, int]]:
        """The pair (first token in the stream, number of tokens) of each piece of a row."""
        span = slice(int(self._rows[row]), int(self._rows[row + 1]))
        return zip(self._begins[span].tolist(), self._lengths[span].tolist(), strict=True)

    def sample(self, index: int, source: int) -> Sample:
        """Row `index`, filled up with end-of-document tokens. The Goldfish hash sees the ids of the whole
        row, as it does in a window."""
        tokens = [self._stream.read(begin, begin + size) for begin, size in self.pieces(index)]
        row = fill_row(
            [(piece, np.ones(piece.size, dtype=np.bool_)) for piece in tokens], self._length, self._eos_id
        )
        if self._goldfish is not None:
            following = np.append(row.input[1:], self._eos_id)
            row.labels[goldfish_mask(following, self._goldfish.k, self._goldfish.h)] = IGNORE_INDEX
        return Sample(row.input, row.labels, row.positions, source)
