from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import zstandard

from apertus_model.data.documents import table_pieces
from apertus_model.data.documents.parsed import Rejection
from apertus_model.data.documents.table_pieces import VALUE_BYTES, decoded_bytes, parquet_rows, pieces

MIB = 2**20
BATCH = {"text": ["a", None, "b" * 10, "", "\u00fc" * 4], "number": [1, 2, None, 4, 5]}
SCALARS = 5 * [VALUE_BYTES]
TEXTS: list[Any] = [
    pyarrow.string(),
    pyarrow.large_string(),
    pyarrow.binary(),
    pyarrow.string_view(),
    pyarrow.dictionary(pyarrow.int8(), pyarrow.string()),
]


def _text(kind: Any) -> pyarrow.Array:
    texts = pyarrow.array(BATCH["text"], pyarrow.string())
    return texts.dictionary_encode().cast(kind) if pyarrow.types.is_dictionary(kind) else texts.cast(kind)


@pytest.mark.parametrize("kind", TEXTS, ids=str)
def test_bytes_of_values_are_those_of_their_text(kind: Any) -> None:
    column = _text(kind)
    expected = [len((text or "").encode()) for text in BATCH["text"]]
    assert decoded_bytes(column).tolist() == expected
    assert decoded_bytes(column.slice(2, 2)).tolist() == expected[2:4]
    assert decoded_bytes(pyarrow.array([], kind)).tolist() == []


@pytest.mark.parametrize(
    ("wrap", "expected"),
    [
        (lambda text: pyarrow.ListArray.from_arrays([0, 2, 2, 5], text), [1, 0, 18]),
        (lambda text: pyarrow.LargeListArray.from_arrays([0, 2, 2, 5], text), [1, 0, 18]),
        (lambda text: pyarrow.FixedSizeListArray.from_arrays(text.slice(0, 4), 2), [1, 10]),
        (lambda text: pyarrow.StructArray.from_arrays([text], ["x"]), [1, 0, 10, 0, 8]),
        (lambda text: pyarrow.MapArray.from_arrays([0, 1, 2], ["k", "l"], text[:2]), [1 + 1 + 8, 1 + 8]),
    ],
)  # fmt: skip
def test_bytes_of_nested_values_are_those_of_their_parts(
    wrap: Callable[[Any], Any], expected: list[int]
) -> None:
    column = wrap(_text(pyarrow.string()))
    sizes = [VALUE_BYTES + size for size in expected]
    assert decoded_bytes(column).tolist() == sizes
    assert decoded_bytes(column.slice(1)).tolist() == sizes[1:]


def test_pieces_hold_all_rows_in_order_but_those_above_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    random = np.random.default_rng(0)
    for most, piece in ((50, 60), (50, 20), (1, 1), (1000, 10**6)):
        monkeypatch.setattr(table_pieces, "PIECE_BYTES", piece)
        sizes = random.integers(0, 80, 200).tolist()
        batch = pyarrow.record_batch({"text": ["x" * size for size in sizes]})
        read: list[int | None] = []
        for found in pieces(batch, most):
            if isinstance(found, Rejection):
                read.append(None)
                continue
            own = [len(row["text"]) for row in found.to_pylist()]
            assert sum(own) <= piece or len(own) == 1
            read += own
        assert read == [size if size <= most else None for size in sizes]


NESTED = {
    "messages": [
        {"role": "user", "content": "Hi", "n": 1},
        {"role": "assistant", "content": None, "n": None},
    ],
    "tags": ["a", "a", None],
    "key": 7,
    "empty": [],
}


@pytest.mark.parametrize("stored", [True, False])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"use_dictionary": False},
        {"use_dictionary": ["tags.list.element"]},
        {"dictionary_pagesize_limit": 64},  # the rest of a column is plain
        {"use_dictionary": False, "column_encoding": {"text": "DELTA_BYTE_ARRAY"}},
        {"use_dictionary": False, "column_encoding": {"text": "DELTA_LENGTH_BYTE_ARRAY"}},
    ],
    ids=str,
)
def test_rows_are_the_same_however_their_values_are_encoded(options: dict[str, Any], stored: bool) -> None:
    rows = [{**NESTED, "text": f"{number % 40}" * 9, "key": number} for number in range(300)]
    buffer = io.BytesIO()
    table = pyarrow.Table.from_pylist(rows)
    pyarrow.parquet.write_table(table, buffer, row_group_size=120, store_schema=stored, **options)
    assert list(parquet_rows(buffer, 10**6)) == rows


COMPRESSORS: dict[str, Callable[[bytes], bytes]] = {
    "gz": gzip.compress,
    "bz2": bz2.compress,
    "xz": lzma.compress,
    "zst": zstandard.ZstdCompressor().compress,
}


def _shared(rows: int, size: int) -> pyarrow.Array:
    """A column of `rows` equal texts, each `size` bytes."""
    indices = pyarrow.array(np.zeros(rows, np.int32))
    return pyarrow.DictionaryArray.from_arrays(indices, pyarrow.array(["d" * size]))


def _dictionary(path: Path) -> None:
    table = pyarrow.table({"text": _shared(20_000, MIB)})
    pyarrow.parquet.write_table(table, path, store_schema=False, compression="zstd")


def _prefixes(path: Path) -> None:
    table = pyarrow.table({"text": ["d" * MIB] * 300})
    options = {"use_dictionary": False, "column_encoding": {"text": "DELTA_BYTE_ARRAY"}}
    pyarrow.parquet.write_table(table, path, compression="zstd", **options)


def _arrow(path: Path) -> None:
    batch = pyarrow.record_batch({"text": _shared(3000, MIB)})
    with pyarrow.OSFile(str(path), "wb") as file, pyarrow.ipc.new_file(file, batch.schema) as writer:
        writer.write_batch(batch)


def _messages(path: Path) -> None:
    content = _shared(30_000, MIB)
    roles = pyarrow.array(["user", "assistant"] * 15_000)
    messages = pyarrow.StructArray.from_arrays([roles, content], ["role", "content"])
    column = pyarrow.ListArray.from_arrays(range(0, 30_001, 2), messages)
    pyarrow.parquet.write_table(pyarrow.table({"messages": column}), path, store_schema=False)


def _one_conversation(path: Path) -> None:
    messages = pyarrow.StructArray.from_arrays([_shared(30_000, MIB)], ["content"])
    column = pyarrow.ListArray.from_arrays([0, 30_000], messages)
    pyarrow.parquet.write_table(pyarrow.table({"messages": column}), path, store_schema=False)


def _lines(suffix: str) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        line = b'{"text": "' + b"b" * (100 * MIB) + b'"}\n'
        path.write_bytes(COMPRESSORS[suffix](line + b'{"text": "short"}\n'))

    return write


ATTACKS: dict[str, tuple[str, Callable[[Path], None], dict[str, int]]] = {
    "a.parquet": ("parquet", _dictionary, {"document": 20_000}),
    "b.parquet": ("parquet", _prefixes, {"document": 300}),
    "c.arrow": ("arrow", _arrow, {"document": 3000}),
    "d.parquet": ("chat", _messages, {"document": 15_000}),
    "e.parquet": ("chat", _one_conversation, {"too_large": 1}),
    **{
        f"f.jsonl.{suffix}": ("jsonl", _lines(suffix), {"document": 1, "too_large": 1})
        for suffix in COMPRESSORS
    },
}
READ = """
import collections, json, resource, sys
from apertus_model.data.conversations.readers import read_conversations
from apertus_model.data.documents.readers import Rejection, open_source, read_documents
from specs.sources import SourceSpec
folder, name, kind = sys.argv[1:]
source = SourceSpec(url=folder, format=kind)
read = read_conversations if kind == "chat" else read_documents
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
count = collections.Counter()
for one in read(source, *open_source(source), name):
    count[one.reason if isinstance(one, Rejection) else "document"] += 1
    if sum(count.values()) == 40:
        break
print(json.dumps([count, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) << 10]))
"""


@pytest.mark.parametrize("name", ATTACKS)
def test_a_small_file_that_decodes_to_gigabytes_takes_little_memory(tmp_path: Path, name: str) -> None:
    kind, write, counts = ATTACKS[name]
    write(tmp_path / name)
    assert (tmp_path / name).stat().st_size < 2 * MIB
    found = subprocess.run(
        [sys.executable, "-c", READ, tmp_path, name, kind],
        capture_output=True,
        text=True,
        check=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (4 * 2**30, 4 * 2**30)),
    )
    count, held = json.loads(found.stdout)
    assert count == {reason: min(number, 40) for reason, number in counts.items()}
    assert held < 256 * MIB
