"""The table of rejects: which documents were removed from a source, by which step, and why.

A unit of work has one Parquet file, `rejects.parquet`; the artifact has `rejects-00000.parquet`, .... A row
is one removed document, so the table tells whether a document was removed, and by which step.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

SCHEMA = pa.schema(
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
ROWS_AT_ONCE = 10_000


class Removed(NamedTuple):
    """A row: one removed document."""

    hash: int
    id: str
    url: str | None
    filter: str
    reason: str


class RejectsWriter:
    """A writer of the table of one unit; it holds at most `ROWS_AT_ONCE` rows."""

    def __init__(self, path: Path) -> None:
        self._writer = pq.ParquetWriter(path, SCHEMA, compression="zstd")
        self._rows: list[Removed] = []

    def add(self, row: Removed) -> None:
        """Adds one removed document."""
        self._rows.append(row)
        if len(self._rows) >= ROWS_AT_ONCE:
            self._flush()

    def _flush(self) -> None:
        columns = zip(*self._rows, strict=True) if self._rows else [[] for _ in SCHEMA]
        arrays = [pa.array(list(values), field.type) for values, field in zip(columns, SCHEMA, strict=True)]
        self._writer.write_table(pa.Table.from_arrays(arrays, schema=SCHEMA))
        self._rows.clear()

    def __enter__(self) -> RejectsWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._flush()
        self._writer.close()


def url_of(columns: Mapping[str, Any]) -> str | None:
    """The URL of a conversation, if its row has one."""
    value = columns.get("url")
    return value if isinstance(value, str) else None


def read_rejects(path: Path) -> pa.Table:
    """The rows of one file, with the columns of `SCHEMA`."""
    return pq.read_table(path, schema=SCHEMA)


def read_line(what: str, rejected: Mapping[str, int], dropped: Mapping[str, int]) -> str:
    """What became of documents, in words: `812 documents read, rejected: 2 not_utf8, dropped: 7 length`.
    `what`: what was read; `dropped`: by label, in the order of the steps."""
    line = f"{what} read"
    for name, counts in (("rejected", dict(sorted(rejected.items()))), ("dropped", dropped)):
        parts = [f"{number} {reason}" for reason, number in counts.items() if number]
        line += f", {name}: {', '.join(parts)}" if parts else ""
    return line
