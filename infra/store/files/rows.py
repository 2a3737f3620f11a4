"""Encodes rows of metrics as Parquet, which every tool for tables reads.

Invariant: rows are decoded as they were given: a field that a row did not have is not added to it, at any
depth.
"""

import io
from collections.abc import Sequence
from typing import Any

from infra.store.documents import MetricsRow
from infra.store.records import DamagedError
from specs.foreign import checked

SUFFIX = ".parquet"


def encode(rows: Sequence[dict[str, Any]]) -> bytes:
    """A table with a column per field; mappings are structs. ForeignError for a row of another form."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    target = io.BytesIO()
    for row in rows:
        checked(MetricsRow, row)
    names = dict.fromkeys(name for row in rows for name in row)
    pq.write_table(pa.table({name: [row.get(name) for row in rows] for name in names}), target)
    return target.getvalue()


def decode(data: bytes, name: str) -> list[dict[str, Any]]:
    """The rows in the content of a file. DamagedError, which names the file, when they cannot be read."""
    try:
        rows = _parquet(data)
        for row in rows:
            checked(MetricsRow, row)
        return rows
    except (ValueError, TypeError, OSError, RecursionError) as error:
        raise DamagedError(f"'{name}' is damaged: its rows cannot be read ({error})") from error


def _parquet(data: bytes) -> list[dict[str, Any]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    # In this thread alone: a thread of pyarrow that still works while the interpreter ends aborts the
    # process.
    table = pq.ParquetFile(pa.BufferReader(data)).read(use_threads=False)
    return [_without_nulls(row) for row in table.to_pylist()]


def _without_nulls(row: dict[str, Any]) -> dict[str, Any]:
    return {
        name: _without_nulls(value) if isinstance(value, dict) else value
        for name, value in row.items()
        if value is not None
    }
