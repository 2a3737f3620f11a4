"""Documents in rows: lines of JSON, Parquet, Arrow (files, streams, shards of `datasets.save_to_disk`).

Invariants:
- The same rows give the same documents and the same rejections in every container: text is bytes that must be
  UTF-8, whatever type the container declares; only the columns that the spec names are read.
- Memory is bounded by one line of JSON of `max_document_bytes` at most; by a piece (`table_pieces`), and a
  page of Parquet or a record batch of Arrow as its writer made it.
- No code of a file is run: types that need it (extensions) are refused, dataset scripts are ignored.
"""

import json
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, BinaryIO

import pyarrow
import pyarrow.ipc
from pyarrow import types

from apertus_model.data.documents.parsed import (
    TOO_LARGE,
    Damaged,
    FoundDocuments,
    NotAsStated,
    Rejection,
    Scalar,
    SourceDocument,
)
from apertus_model.data.documents.table_pieces import READ_BYTES, is_binary, is_text, parquet_batches, pieces
from specs.foreign import shown
from specs.sources import SourceSpec

JSON_TYPES: dict[str, tuple[set[type], str]] = {
    "text_column": ({str}, ", not text"),
    "id_column": ({str, int}, "; an identifier is text or an integer"),
    "metadata": ({str, int, float, bool}, "; metadata are single values"),
}
"""What a column of JSON may hold beside null, by the field that names the column; and the end of the message
about another value."""
ARROW_TYPES: dict[str, tuple[Callable[[pyarrow.DataType], bool], str]] = {
    "text_column": (lambda kind: is_text(kind) or types.is_null(kind), ", not text"),
    "id_column": (
        lambda kind: is_text(kind) or types.is_integer(kind),
        "; an identifier is text or an integer",
    ),
    "metadata": (
        lambda kind: (is_text(kind) and not is_binary(kind)) or _is_number(kind) or types.is_temporal(kind),
        "; metadata are text, numbers, truth values or times",
    ),
}
"""The same for a column of Parquet or Arrow."""
ROWS_WITHOUT = 1000
"""A file none of whose first rows, of this number, has the columns that are read ends the stage."""


def json_lines(file: BinaryIO, source: SourceSpec) -> FoundDocuments:
    """The documents of lines of JSON, one per line. datatrove's JsonlReader abandons a file at the first byte
    that is not UTF-8 and only logs broken lines; here each broken line is counted, and so is each row without
    the columns that the spec names. NotAsStated if none of the first ROWS_WITHOUT lines has them."""
    first, known = None, False
    for number, row in json_rows(file, source.max_document_bytes):
        if isinstance(row, Rejection):
            yield row
            continue
        try:
            document = _json_document(row, source, f"line {number}")
            known = True
        except NotAsStated as error:
            first = first or error
            if not known and number >= ROWS_WITHOUT:
                break
            document = Rejection("no_columns", problem=error.problem)
        yield document
    if first and not known:
        raise first


def _json_document(row: dict[str, Any], source: SourceSpec, place: str) -> SourceDocument | Rejection:
    for field, name in _require(list(row), source, place):
        value, (kinds, required) = row[name], JSON_TYPES[field]
        if value is not None and type(value) not in kinds:
            raise NotAsStated(f"column '{name}' holds {shown(value)}{required}", f"correct {field}", place)
    identifier = None if source.id_column is None else row[source.id_column]
    return _document(row[source.text_column], identifier, {name: row[name] for name in source.metadata})


def json_rows(
    file: BinaryIO, most: int, parse_constant: Callable[[str], None] | None = None
) -> Iterator[tuple[int, dict[str, Any] | Rejection]]:
    """The rows, each with the number of its line; empty lines are skipped. `most`: bytes of a line;
    `parse_constant`: that of `json.loads`, for NaN and the infinities."""
    for number, line in enumerate(read_lines(file, most), start=1):
        if isinstance(line, Rejection):
            yield number, line
        elif line.strip():
            yield number, _json_row(line, parse_constant)


def _json_row(line: bytes, parse_constant: Callable[[str], None] | None) -> dict[str, Any] | Rejection:
    try:
        row = json.loads(line, parse_constant=parse_constant)
    except UnicodeDecodeError:
        return Rejection("not_utf8")
    except (ValueError, RecursionError):
        return Rejection("not_json")
    return row if isinstance(row, dict) else Rejection("not_json")


def read_lines(file: BinaryIO, most: int) -> Iterator[bytes | Rejection]:
    """Lines without line ends. A line longer than `most` bytes is a rejection and is not held in memory."""
    while line := file.readline(most + 1):
        if len(line) <= most or line.endswith(b"\n"):
            yield line.removesuffix(b"\n")
            continue
        while line and not line.endswith(b"\n"):
            line = file.readline(READ_BYTES)
        yield Rejection(TOO_LARGE)


def parquet(file: BinaryIO, source: SourceSpec) -> FoundDocuments:
    """Documents of a Parquet file."""
    for batch in parquet_batches(file, partial(_columns, source=source)):
        yield from _rows(batch, source)


def arrow(file: BinaryIO, source: SourceSpec) -> FoundDocuments:
    """Documents of a file in Arrow's IPC file format or its stream format. A stream must end with its marker:
    without it, a truncated stream looks complete."""
    is_file = file.read(6) == b"ARROW1"
    file.seek(0)
    schema = (pyarrow.ipc.open_file if is_file else pyarrow.ipc.open_stream)(file).schema
    columns = _columns(schema, source)
    options = pyarrow.ipc.IpcReadOptions(included_fields=[schema.get_field_index(name) for name in columns])
    file.seek(0)
    if is_file:
        reader = pyarrow.ipc.open_file(file, options=options)
        for number in range(reader.num_record_batches):
            yield from _rows(reader.get_batch(number), source)
        return
    watched = _WatchedEnd(file)
    for batch in pyarrow.ipc.open_stream(pyarrow.PythonFile(watched, mode="r"), options=options):
        yield from _rows(batch, source)
    if watched.passed:
        raise Damaged("it ends without the end-of-stream marker of Arrow: a part of it is missing")


class _WatchedEnd:
    """A file that remembers whether a read went past its end."""

    closed = False

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.passed = False

    def read(self, size: int) -> bytes:
        data = self._file.read(size)
        self.passed |= len(data) < size
        return data


def _require(present: list[str], source: SourceSpec, place: str = "") -> list[tuple[str, str]]:
    """The columns that the spec names, each with its field. NotAsStated for one that is not there once."""
    asked = [("text_column", source.text_column), *(("metadata", name) for name in source.metadata)]
    if source.id_column is not None:
        asked.append(("id_column", source.id_column))
    for field, name in asked:
        if name not in present:
            raise NotAsStated(
                f"no column '{name}'; there are {', '.join(sorted(present)) or 'none'}",
                f"correct {field}",
                place,
            )
        if present.count(name) > 1:
            raise NotAsStated(f"there are {present.count(name)} columns '{name}'", f"correct {field}", place)
    return asked


def _columns(schema: pyarrow.Schema, source: SourceSpec) -> list[str]:
    """The columns that the spec names. NotAsStated for a missing one, or one whose type does not fit."""
    asked = _require(schema.names, source)
    for field, name in asked:
        kind = schema.field(name).type
        fits, required = ARROW_TYPES[field]
        if not fits(kind.value_type if types.is_dictionary(kind) else kind):
            raise NotAsStated(f"column '{name}' holds {kind}{required}", f"correct {field}")
    return list(dict.fromkeys(name for _, name in asked))


def _is_number(kind: pyarrow.DataType) -> bool:
    return types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind) or types.is_null(kind)


def _rows(batch: pyarrow.RecordBatch, source: SourceSpec) -> FoundDocuments:
    names = list(dict.fromkeys(batch.schema.names))
    checked = pyarrow.RecordBatch.from_arrays([_checked(batch.column(name)) for name in names], names)
    for piece in pieces(checked, source.max_document_bytes):
        if isinstance(piece, Rejection):
            yield piece
            continue
        values = {name: _values(piece.column(name)) for name in names}
        for row in range(piece.num_rows):
            identifier = None if source.id_column is None else values[source.id_column][row]
            metadata = {name: values[name][row] for name in source.metadata}
            yield _document(values[source.text_column][row], identifier, metadata)


def _checked(column: pyarrow.Array) -> pyarrow.Array:
    """The column, with text as bytes. ArrowInvalid when offsets or indices lead out of its buffers."""
    if types.is_dictionary(column.type):
        column.indices.validate(full=True)
        return pyarrow.DictionaryArray.from_arrays(column.indices, _checked(column.dictionary))
    if types.is_string(column.type) or types.is_large_string(column.type):
        # The same buffers, seen as bytes: their structure is checked here, and UTF-8 row by row.
        column = column.view(pyarrow.binary() if types.is_string(column.type) else pyarrow.large_binary())
    column.validate(full=True)
    return column


def _values(column: pyarrow.Array) -> list[Any]:
    """The values of a checked column: numbers as they are, text as bytes, times as ISO text. Times with a
    time zone are in UTC, which needs no database of zones."""
    if types.is_dictionary(column.type):
        used = column.indices.dictionary_encode()  # an entry is held once, however many rows have it
        entries = _values(column.dictionary.take(used.dictionary))
        return [None if index is None else entries[index] for index in used.indices.to_pylist()]
    if types.is_timestamp(column.type) and column.type.tz is not None:
        return [value and f"{value}Z" for value in _values(column.cast(pyarrow.timestamp(column.type.unit)))]
    return (column.cast(pyarrow.string()) if types.is_temporal(column.type) else column).to_pylist()


def _document(
    text: str | bytes | None, identifier: Any, metadata: dict[str, Any]
) -> SourceDocument | Rejection:
    values: dict[str, Scalar] = {}
    for name, value in (("", text), *metadata.items()):
        if isinstance(value, (bytes, str)):
            try:
                value = value.decode() if isinstance(value, bytes) else value
                value.encode()  # an escape in JSON may spell half a surrogate pair
            except UnicodeError:
                return Rejection("not_utf8")
        values[name] = value
    body = values.pop("")
    if not isinstance(body, str) or not body.strip():
        return Rejection("empty")
    return SourceDocument(body, _identifier(identifier), values)


def _identifier(value: Any) -> str | None:
    """The identifier as text; bytes that are not UTF-8 become escapes, since it is not trained on."""
    if isinstance(value, bytes):
        return value.decode(errors="backslashreplace")
    return None if value is None else str(value)
