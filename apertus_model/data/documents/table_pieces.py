"""Tables in pieces of bounded memory.

Invariant: what is held follows from the bytes of decoded values, not from the numbers of rows or the size of
the file: a dictionary, a shared prefix or a compressed run can stand for any number of bytes. Columns of
Parquet that have dictionaries are read as such, and decoded a piece at a time. A row above a bound is never
decoded to Python's objects.
"""

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, BinaryIO

import numpy as np
import pyarrow
import pyarrow.compute
import pyarrow.parquet
from numpy.typing import NDArray
from pyarrow import types

from apertus_model.data.documents.parsed import TOO_LARGE, Damaged, Rejection

ROWS_PER_BATCH = 4096
PIECE_BYTES = 2**25
READ_BYTES = 2**20
VALUE_BYTES = 8  # that a value without text counts
DICTIONARY = {"PLAIN_DICTIONARY", "RLE_DICTIONARY"}
READ_AS_DICTIONARY = {*DICTIONARY, "PLAIN", "RLE", "BIT_PACKED"}
"""Encodings of a column that Arrow can read as a dictionary."""
SHARED = {*DICTIONARY, "DELTA_BYTE_ARRAY"}
"""Encodings by which values share bytes."""


def parquet_batches(
    file: BinaryIO, choose: Callable[[pyarrow.Schema], list[str] | None]
) -> Iterator[pyarrow.RecordBatch]:
    """Batches of a Parquet file, row group by row group, of PIECE_BYTES (or one row) as they are in the file.
    `choose`: gives the names of the columns that are read; None for all. Damaged when there are more or fewer
    rows than the footer states."""
    options = {"buffer_size": READ_BYTES, "pre_buffer": False, "page_checksum_verification": True}
    opened = partial(pyarrow.parquet.ParquetFile, file, **options)
    table = opened()
    columns, metadata = choose(table.schema_arrow), table.metadata
    groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
    chunks = [[group.column(number) for number in range(group.num_columns)] for group in groups]
    dictionaries = [
        column[0].path_in_schema
        for column in zip(*chunks, strict=False)
        if column[0].physical_type == "BYTE_ARRAY" and _is_shared(column)
    ]
    reader, rows = opened(metadata=metadata, read_dictionary=dictionaries), 0
    for number, (group, own) in enumerate(zip(groups, chunks, strict=True)):
        held = max(group.total_byte_size, *(VALUE_BYTES * chunk.num_values for chunk in own), 1)
        size = max(1, min(ROWS_PER_BATCH, PIECE_BYTES * group.num_rows // held))
        if any(SHARED & {*chunk.encodings} and chunk.path_in_schema not in dictionaries for chunk in own):
            size = 1
        for batch in reader.iter_batches(size, row_groups=[number], columns=columns):
            yield batch
            rows += batch.num_rows
    if rows != metadata.num_rows:
        raise Damaged(f"{rows} rows in its row groups, {metadata.num_rows} in its footer")


def _is_shared(column: Iterable[pyarrow.parquet.ColumnChunkMetaData]) -> bool:
    """Whether a column has a dictionary, and Arrow can read it as one."""
    encodings = {encoding for chunk in column for encoding in chunk.encodings}
    return bool(DICTIONARY & encodings) and encodings <= READ_AS_DICTIONARY


def parquet_rows(file: BinaryIO, most: int) -> Iterator[dict[str, Any] | Rejection]:
    """The rows of a Parquet file; a rejection for a row of more than `most` bytes."""
    for batch in parquet_batches(file, lambda schema: None):
        for piece in pieces(batch, most):
            yield from [piece] if isinstance(piece, Rejection) else piece.to_pylist()


def pieces(batch: pyarrow.RecordBatch, most: int) -> Iterator[pyarrow.RecordBatch | Rejection]:
    """Consecutive rows of a checked batch, of PIECE_BYTES decoded (or one row); a rejection for a row of more
    than `most` bytes."""
    sizes = sum((decoded_bytes(column) for column in batch.columns), np.zeros(batch.num_rows, np.int64))
    begin = held = 0
    for row, size in enumerate(sizes.tolist()):
        if held and (held + size > PIECE_BYTES or size > most):
            yield batch.slice(begin, row - begin)
            begin, held = row, 0
        held += max(size, 1)
        if size > most:
            yield Rejection(TOO_LARGE)
            begin, held = row + 1, 0
    if held:
        yield batch.slice(begin)


def decoded_bytes(column: pyarrow.Array) -> NDArray[np.int64]:
    """The bytes of each value, decoded: of text its bytes, of any other value VALUE_BYTES."""
    if isinstance(column, pyarrow.ExtensionArray):
        column = column.storage
    kind = column.type
    if types.is_dictionary(kind):
        entries = np.append(decoded_bytes(column.dictionary), 0)
        return entries[column.indices.cast(pyarrow.int64()).fill_null(len(entries) - 1).to_numpy()]
    if types.is_string_view(kind) or types.is_binary_view(kind):  # a view begins with its length
        views = np.frombuffer(column.buffers()[1] or b"", np.int32)[::4]
        lengths = views[column.offset : column.offset + len(column)].astype(np.int64)
        return np.where(column.is_valid().to_numpy(False), lengths, 0)
    if is_text(kind):
        lengths = pyarrow.compute.binary_length(column).fill_null(0)
        return lengths.cast(pyarrow.int64()).to_numpy()
    sizes = np.full(len(column), VALUE_BYTES, np.int64)
    if types.is_struct(kind):
        return sum(map(decoded_bytes, column.flatten()), sizes)
    if types.is_list(kind) or types.is_large_list(kind) or types.is_map(kind):
        ends = np.append(0, np.cumsum(decoded_bytes(column.values)))
        return sizes + np.diff(ends[column.offsets.to_numpy()])
    if types.is_fixed_size_list(kind):
        return decoded_bytes(column.cast(pyarrow.list_(kind.value_type)))
    return sizes


def is_binary(kind: pyarrow.DataType) -> bool:
    return types.is_binary(kind) or types.is_large_binary(kind) or types.is_binary_view(kind)


def is_text(kind: pyarrow.DataType) -> bool:
    return (
        types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind) or is_binary(kind)
    )
