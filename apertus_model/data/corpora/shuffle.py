"""The order of a corpus: the keys of documents, and the files that hold sorted ranges of keys.

The key of a document is a keyed hash of its text as read and of its number among copies of that text. A split
of T tokens has N = ceil(T / shard_tokens) shards, and shard s holds the keys [s/N, (s+1)/N) of the range of
all keys, sorted. The tokens of a document stay together.

Invariants:
- The order is a function of the set of documents, of the seed and of the shard size. Names of files,
  tasks, workers and memory do not matter: cells cut a shard into smaller ranges of keys, one after the other.
- Memory: a few cells of rows.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import DTypeLike, NDArray

from apertus_model.data.corpora.records import REJECTS, SIDE, column, side_fields
from apertus_model.data.order.permutation import mix_array
from apertus_model.data.tokens.megatron import TokenFileWriter

AT_ONCE = 4096
ROW_GROUP = 2**14
DOCUMENTS = pa.schema(
    [
        pa.field("key", pa.uint64()),
        pa.field("text", pa.uint64()),
        pa.field("copy", pa.uint32()),
        pa.field("tokens", pa.large_binary()),
        *side_fields(),
    ]
)
"""Documents on their way to a shard. A copy of a memorisation probe has no `id`."""
REJECTED = pa.schema([pa.field("key", pa.uint64()), pa.field("row", pa.uint64()), *REJECTS])
SIDE_TABLE = pa.schema(
    [
        pa.field("hash", pa.uint64(), nullable=False),  # of the text as read
        *side_fields(),  # `id` is null for a copy of a memorisation probe
        pa.field("offset", pa.int64(), nullable=False),  # first token in the shard
        pa.field("tokens", pa.int32(), nullable=False),
    ]
)
"""`<shard>.documents.parquet`: row i is document i of the shard."""


def shuffle_keys(
    texts: NDArray[np.uint64], copies: NDArray[np.integer], seed: int, name: str
) -> NDArray[np.uint64]:
    """The key of each document, (documents,); `name` tells different orders of one seed apart."""
    digest = hashlib.blake2b(json.dumps([seed, name]).encode(), digest_size=8, person=b"apertus-shuffle")
    start = np.uint64(int.from_bytes(digest.digest(), "little"))
    return mix_array(mix_array(mix_array(texts ^ start)) + copies.astype(np.uint64))


def token_column(tokens: NDArray[np.integer], sizes: NDArray[np.int64]) -> pa.LargeBinaryArray:
    """The tokens of documents, back to back in `tokens`, as a column. Nothing is copied."""
    ends = np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)]) * tokens.itemsize
    buffers = [None, pa.py_buffer(ends), pa.py_buffer(tokens)]
    return pa.LargeBinaryArray.from_buffers(pa.large_binary(), len(sizes), buffers)


def write_shard(
    cells: Iterable[pa.Table], prefix: Path, dtype: DTypeLike
) -> tuple[dict[str, Path], int, int]:
    """Writes the documents of consecutive cells as a shard with its side table. Returns the files by name,
    and the numbers of documents and tokens."""
    name = prefix.name
    paths = {f"{name}{suffix}": prefix.with_name(f"{name}{suffix}") for suffix in (".bin", ".idx")}
    side = f"{name}.documents.parquet"
    paths[side] = prefix.with_name(side)
    with TokenFileWriter(prefix, dtype) as writer, _Rows(paths[side], SIDE_TABLE) as rows:
        for table in cells:
            for block in _sorted(table, ("copy", "text", "key")):
                column_ = block.column("tokens")
                ends = np.frombuffer(column_.buffers()[1], np.int64)[column_.offset :][: len(column_) + 1]
                data = np.frombuffer(column_.buffers()[2], np.uint8)[ends[0] : ends[-1]].view(writer.dtype)
                sizes = (np.diff(ends) // writer.dtype.itemsize).astype(np.int32)
                offsets = writer.tokens + np.cumsum(sizes, dtype=np.int64) - sizes
                writer.write_many(data, sizes)
                columns = [block.column("text"), *(block.column(name) for name in SIDE)]
                rows.write(pa.table([*columns, pa.array(offsets), pa.array(sizes)], schema=SIDE_TABLE))
        documents, tokens = writer.documents, writer.tokens
    return paths, documents, tokens


def write_table(cells: Iterable[pa.Table], path: Path, schema: pa.Schema, keys: tuple[str, ...]) -> None:
    """Writes the columns of `schema`, sorted by `keys`, of which the last is the primary one."""
    with _Rows(path, schema) as rows:
        for table in cells:
            for block in _sorted(table, keys):
                rows.write(pa.Table.from_batches([block]).select(schema.names).cast(schema))


def _sorted(table: pa.Table, keys: tuple[str, ...]) -> Iterable[pa.RecordBatch]:
    """The rows, AT_ONCE at a time, sorted by `keys`, the last first, in place of the table in memory."""
    order = pa.array(np.lexsort([_sortable(table, name) for name in keys]))
    batches = table.combine_chunks().to_batches()
    for start in range(0, len(order) if batches else 0, AT_ONCE):
        yield batches[0].take(order.slice(start, AT_ONCE))


def _sortable(table: pa.Table, name: str) -> NDArray:
    if pa.types.is_integer(table.schema.field(name).type):
        return column(table, name)
    return np.asarray(table.column(name).to_pylist(), dtype=str)


class _Rows:
    """A writer of a Parquet file in groups of `ROW_GROUP` rows, whatever the sizes of the tables."""

    def __init__(self, path: Path, schema: pa.Schema) -> None:
        # A dictionary of hashes, which seldom repeat, would waste memory.
        repeated = [field.name for field in schema if pa.types.is_string(field.type)]
        self._writer = pq.ParquetWriter(path, schema, compression="zstd", use_dictionary=repeated)
        self._held: list[pa.Table] = []
        self._rows = 0

    def write(self, table: pa.Table) -> None:
        self._held.append(table)
        self._rows += table.num_rows
        while self._rows >= ROW_GROUP:
            self._flush(ROW_GROUP)

    def _flush(self, rows: int) -> None:
        table = pa.concat_tables(self._held)
        self._writer.write_table(table.slice(0, rows), row_group_size=ROW_GROUP)
        self._held = [table.slice(rows)]
        self._rows -= rows

    def __enter__(self) -> _Rows:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None and self._rows:
            self._flush(self._rows)
        self._writer.close()
