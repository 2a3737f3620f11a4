"""Two tables of the documents of a source. The records have what later passes need besides tokens; the
rejects have the removed documents, each with the step that removed it, and why.

A task writes `documents.parquet`, with a row for each document, in the order in which they were read. A unit
of a `conversations` stage has a table of rejects, `rejects.parquet`; artifacts have several.

Invariants:
- A row is a function of the document and the spec.
- Memory is bounded: a writer holds `ROWS` rows, and so does a reader.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from datatrove.data import Document
from numpy.typing import NDArray

from apertus_model.data.corpora.duplicates import text_hash
from apertus_model.data.corpora.filters import Drop
from apertus_model.data.documents.addresses import parse
from specs.filters import FilterSpec, NearDuplicatesFilter
from specs.stages.corpus import CorpusSource

ROWS = 4096
REPEATED = ("domain", "license", "language")
REJECTED = -1  # in place of a step: the reader found no document
SIDE = ("id", "url", "domain", "license", "language")
"""Columns of the side table that a source may have; `domain` is the host of `url`."""


def side_fields() -> list[pa.Field]:
    return [pa.field(name, pa.large_string()) for name in SIDE]


def side_values(document: Document) -> tuple[str | None, ...]:
    """The values of a document in the columns `SIDE`; None for those that its source does not state."""
    url, license_, language = (document.metadata.get(name) for name in ("url", "license", "language"))
    address = parse(str(url)) if url is not None else None
    domain = address.host if address is not None else None
    columns = url, domain, license_, language
    return (str(document.id), *(None if value is None else str(value) for value in columns))


def excluded_values(drop: Drop | None) -> tuple[str | None, str | None]:
    """The domain and the agents of a drop by robots.txt; None for any other drop."""
    if drop is None or drop.excluded is None:
        return None, None
    return drop.excluded.domain, ",".join(drop.excluded.agents)


def row_hash(side: Sequence[str | None]) -> int:
    return text_hash("\0".join(f"={value}" if value is not None else "" for value in side))


def signature_column(step: NearDuplicatesFilter) -> str:
    """The name of the column of a step's signatures, equal for steps whose signatures are equal."""
    return f"signature-{step.ngram}-{step.buckets}-{step.hashes_per_bucket}-{step.seed}"


def near_steps(steps: Sequence[FilterSpec]) -> list[NearDuplicatesFilter]:
    """The steps that need signatures, one step for each kind of signature."""
    by_column = {signature_column(step): step for step in steps if isinstance(step, NearDuplicatesFilter)}
    return list(by_column.values())


def record_schema(process: CorpusSource) -> pa.Schema:
    return pa.schema(
        [
            pa.field("text", pa.uint64()),  # hash of the text as read; 0 for a rejection
            pa.field("columns", pa.uint64()),  # hash of the columns that filters read
            pa.field("final", pa.uint64()),  # hash of the text as tokenised; 0 if it was not tokenised
            pa.field("row", pa.uint64()),  # hash of the columns from `id` to `language`
            pa.field("characters", pa.int64()),  # of the text as read
            pa.field("step", pa.int16()),  # step that dropped it in its task, number of steps, or REJECTED
            *(pa.field(f"replaced-{kind}", pa.uint32()) for kind in process.replaced),
            *side_fields(),
            pa.field("reason", pa.large_string()),  # of the drop or rejection
            pa.field("excluded", pa.large_string()),  # host or domain, where robots.txt excludes the document
            pa.field("agents", pa.large_string()),  # the agents that robots.txt keeps out, joined by commas
            pa.field("excluded-tokens", pa.int64()),  # tokens an excluded document would have; 0 for others
            *(
                pa.field(signature_column(step), pa.list_(pa.uint64(), step.buckets))
                for step in near_steps(process.filters)
            ),
        ]
    )


class RecordWriter:
    """A context manager that writes rows of a table. `repeated`: the columns whose values repeat."""

    def __init__(self, path: Path, schema: pa.Schema, repeated: Sequence[str]) -> None:
        self._schema = schema
        self._writer = pq.ParquetWriter(path, schema, compression="zstd", use_dictionary=list(repeated))
        self._rows: list[tuple[Any, ...]] = []

    def add(self, row: tuple[Any, ...]) -> None:
        """Adds a row: a value for each column."""
        self._rows.append(row)
        if len(self._rows) == ROWS:
            self._flush()

    def _flush(self) -> None:
        if not self._rows:
            return
        columns = zip(*self._rows, strict=True)
        arrays = [
            _signatures(values, field.type)
            if pa.types.is_fixed_size_list(field.type)
            else pa.array(values, field.type)
            for values, field in zip(columns, self._schema, strict=True)
        ]
        self._writer.write_batch(pa.record_batch(arrays, schema=self._schema))
        self._rows = []

    def __enter__(self) -> RecordWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self._flush()
        self._writer.close()


def _signatures(values: tuple[NDArray[np.uint64] | None, ...], kind: pa.FixedSizeListType) -> pa.Array:
    """The signatures as a column. A document that no step signed has zeros, which nothing reads."""
    none = np.zeros(kind.list_size, np.uint64)
    flat = np.concatenate([none if value is None else value for value in values])
    return pa.FixedSizeListArray.from_arrays(pa.array(flat, pa.uint64()), kind.list_size)


def read_records(file: BinaryIO, columns: list[str] | None = None) -> Iterator[pa.RecordBatch]:
    """The rows of a task's table, a few thousand at a time."""
    table = pq.ParquetFile(file)
    for group in range(table.num_row_groups):
        yield from (
            table.read_row_group(group, columns=columns, use_threads=False).combine_chunks().to_batches()
        )


def column(batch: pa.RecordBatch | pa.Table, name: str) -> NDArray[Any]:
    """A column of numbers without nulls, (rows,)."""
    values = batch.column(name)
    return values.to_numpy() if isinstance(values, pa.ChunkedArray) else values.to_numpy(zero_copy_only=False)


def signatures(batch: pa.RecordBatch | pa.Table, name: str) -> NDArray[np.uint64]:
    """The values of a column of signatures: (rows, buckets)."""
    values = batch.column(name)
    values = values.combine_chunks() if isinstance(values, pa.ChunkedArray) else values
    flat: NDArray[np.uint64] = values.flatten().to_numpy()
    return flat.reshape(len(values), values.type.list_size)


REJECTS = pa.schema(
    [
        pa.field("hash", pa.uint64(), nullable=False),  # `duplicates.text_hash` of the text as read, or 0
        pa.field("id", pa.string(), nullable=False),  # of the document in its source
        pa.field("url", pa.string()),  # the document's column `url`; null if it has none
        # label of the step, such as `length-2`; `rejected` for a malformed document, whose hash is 0; for
        # conversations also `duplicates` (of their content), `share` and `count`
        pa.field("filter", pa.string(), nullable=False),
        pa.field("reason", pa.string(), nullable=False),  # what was measured, and what is required
    ]
)


class Removed(NamedTuple):
    hash: int
    id: str
    url: str | None
    filter: str
    reason: str


def rejects_writer(path: Path) -> RecordWriter:
    """A writer of the table of one unit, whose rows are `Removed`."""
    return RecordWriter(path, REJECTS, ["filter", "reason"])


def url_of(columns: Mapping[str, Any]) -> str | None:
    """The URL of a conversation, if its row has one."""
    value = columns.get("url")
    return value if isinstance(value, str) else None


def read_rejects(path: Path) -> pa.Table:
    """The rows of one file, with the columns of `REJECTS`."""
    return pq.read_table(path, schema=REJECTS)


def read_line(what: str, rejected: Mapping[str, int], dropped: Mapping[str, int]) -> str:
    """What became of documents, in words: `812 documents read, rejected: 2 not_utf8, dropped: 7 length`.
    `what`: what was read; `dropped`: by label, in the order of the steps."""
    line = f"{what} read"
    for name, counts in (("rejected", dict(sorted(rejected.items()))), ("dropped", dropped)):
        parts = [f"{number} {reason}" for reason, number in counts.items() if number]
        line += f", {name}: {', '.join(parts)}" if parts else ""
    return line
