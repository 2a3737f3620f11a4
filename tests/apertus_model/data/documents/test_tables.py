from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import pyarrow.ipc
import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st

from apertus_model.data.documents import table_pieces, tables
from apertus_model.data.documents.parsed import Rejection, SourceDocument
from apertus_model.data.documents.readers import open_source, read_documents, texts_of
from infra.store.inputs import SourceError, list_source
from specs.sources import SourceSpec

ROWS: list[dict[str, Any]] = [
    {"body": "one", "key": 7, "url": "https://a.example", "score": 0.25, "good": True, "tags": ["x"]},
    {"body": None, "key": 8, "url": "https://b.example", "score": 0.5, "good": False, "tags": []},
    {"body": " \n", "key": 9, "url": None, "score": 0.5, "good": None, "tags": []},
    {"body": "zwei ż", "key": None, "url": None, "score": None, "good": False, "tags": ["y", "z"]},
]
TABLE = pyarrow.Table.from_pylist(ROWS)
COLUMNS = {"text_column": "body", "id_column": "key", "metadata": ["url", "score", "good"]}
EXPECTED = [
    SourceDocument("one", "7", {"url": "https://a.example", "score": 0.25, "good": True}),
    Rejection("empty"),
    Rejection("empty"),
    SourceDocument("zwei ż", None, {"url": None, "score": None, "good": False}),
]


def _jsonl(table: pyarrow.Table) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in table.to_pylist()).encode()


def _parquet(table: pyarrow.Table) -> bytes:
    buffer = io.BytesIO()
    pyarrow.parquet.write_table(table, buffer, row_group_size=2, write_page_checksum=True)
    return buffer.getvalue()


def _stream(table: pyarrow.Table) -> bytes:
    buffer = io.BytesIO()
    with pyarrow.ipc.new_stream(buffer, table.schema) as writer:
        writer.write_table(table, max_chunksize=2)
    return buffer.getvalue()


def _file(table: pyarrow.Table) -> bytes:
    buffer = io.BytesIO()
    with pyarrow.ipc.new_file(
        buffer, table.schema, options=pyarrow.ipc.IpcWriteOptions(compression="zstd")
    ) as writer:
        writer.write_table(table, max_chunksize=2)
    return buffer.getvalue()


CONTAINERS = [("jsonl", _jsonl), ("parquet", _parquet), ("arrow", _stream), ("arrow", _file)]
TYPED = CONTAINERS[1:]


def _read(folder: Path, kind: str, content: bytes, **fields: Any) -> list[SourceDocument | Rejection]:
    path = folder / f"rows.{kind}"
    path.write_bytes(content)
    source = SourceSpec(url=str(folder), format=kind, **fields)  # type: ignore[arg-type]
    return list(read_documents(source, *open_source(source), path.name))


@pytest.mark.parametrize(("kind", "write"), CONTAINERS)
def test_the_same_rows_are_the_same_documents_in_every_container(
    tmp_path: Path, kind: str, write: Callable[..., bytes]
) -> None:
    assert _read(tmp_path, kind, write(TABLE), **COLUMNS) == EXPECTED


def test_dataset_saved_to_disk_reads_only_its_shards(tmp_path: Path) -> None:
    datasets.disable_progress_bars()
    datasets.DatasetDict({"train": datasets.Dataset(TABLE)}).save_to_disk(
        str(tmp_path / "saved"), num_shards={"train": 2}
    )
    source = SourceSpec(url=str(tmp_path / "saved"), format="arrow", **COLUMNS)  # type: ignore[arg-type]
    files = [file.path for file in list_source(source).files]
    assert files == ["train/data-00000-of-00002.arrow", "train/data-00001-of-00002.arrow"]
    assert [
        found for file in files for found in read_documents(source, *open_source(source), file)
    ] == EXPECTED


def _texts_of(folder: Path, **fields: Any) -> list[str]:
    return list(texts_of(SourceSpec(url=str(folder), format="arrow", **fields)))


def test_what_programs_computed_beside_a_saved_dataset_is_not_read(tmp_path: Path) -> None:
    datasets.disable_progress_bars()
    texts = [f"text {number}" for number in range(9)]
    datasets.Dataset.from_dict({"text": texts}).save_to_disk(str(tmp_path), num_shards=3)
    datasets.load_from_disk(str(tmp_path)).map(lambda row: {"text": row["text"].upper()})
    datasets.load_from_disk(str(tmp_path)).filter(lambda row: row["text"] > "text 4")
    assert len(list(tmp_path.glob("cache-*.arrow"))) == 2
    assert _texts_of(tmp_path) == datasets.load_from_disk(str(tmp_path))["text"][:] == texts
    assert _texts_of(tmp_path, include=["data-00001*"]) == texts[3:6]
    (tmp_path / "data-00001-of-00003.arrow").unlink()
    with pytest.raises(
        SourceError, match=r"state\.json' of .* names data-00001-of-00003\.arrow, which is missing"
    ):
        _texts_of(tmp_path)


def test_splits_of_a_saved_dataset_are_not_mixed(tmp_path: Path) -> None:
    datasets.disable_progress_bars()
    splits = {name: datasets.Dataset.from_dict({"text": [name]}) for name in ("train", "test")}
    datasets.DatasetDict(splits).save_to_disk(str(tmp_path / "saved"))
    for folder in (tmp_path / "saved", tmp_path):
        with pytest.raises(
            SourceError, match=r"would mix the splits test, train .* Fix: name the folder of one"
        ):
            _texts_of(folder)
    assert _texts_of(tmp_path / "saved" / "test") == ["test"]
    assert _texts_of(tmp_path / "saved", include=["train/*.arrow"]) == ["train"]


def test_a_damaged_state_of_a_saved_dataset_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.arrow").write_bytes(_stream(pyarrow.table({"text": ["a"]})))
    (tmp_path / "state.json").write_text('{"step": 3}')
    assert _texts_of(tmp_path) == ["a"]  # of another program
    for content in ("{", '{"_data_files": 1}'):
        (tmp_path / "state.json").write_text(content)
        with pytest.raises(SourceError, match=r"cannot read '.*state\.json' of "):
            _texts_of(tmp_path)


@pytest.mark.parametrize(("kind", "write"), TYPED)
@pytest.mark.parametrize(
    "type_",
    [
        pyarrow.large_string(),
        pyarrow.binary(),
        pyarrow.string_view(),
        pyarrow.dictionary(pyarrow.int8(), pyarrow.string()),
    ],
    ids=str,
)
def test_every_type_of_text_is_text(
    tmp_path: Path, kind: str, write: Callable[..., bytes], type_: pyarrow.DataType
) -> None:
    table = pyarrow.table({"text": pyarrow.array(["one", None, "zwei ż"]).cast(type_)})
    assert _read(tmp_path, kind, write(table)) == [
        SourceDocument("one", None, {}),
        Rejection("empty"),
        SourceDocument("zwei ż", None, {}),
    ]


@pytest.mark.parametrize(("kind", "write"), TYPED)
def test_rows_whose_text_is_not_utf8_are_counted_one_by_one(
    tmp_path: Path, kind: str, write: Callable[..., bytes]
) -> None:
    column = pyarrow.array([b"one", b"\xff\xfe", b"two \xed\xa0\xbd", b"three"]).view(pyarrow.string())
    found = _read(tmp_path, kind, write(pyarrow.table({"text": column})))
    assert found == [
        SourceDocument("one", None, {}),
        *[Rejection("not_utf8")] * 2,
        SourceDocument("three", None, {}),
    ]
    found = _read(
        tmp_path, kind, write(pyarrow.table({"text": ["a", "b", "c", "d"], "url": column})), metadata=["url"]
    )
    assert [isinstance(one, Rejection) for one in found] == [False, True, True, False]


SECONDS = 1_714_979_289  # 2024-05-06 07:08:09 in UTC


@pytest.mark.parametrize(("kind", "write"), TYPED)
@pytest.mark.parametrize(
    ("type_", "value", "text"),
    [
        (pyarrow.timestamp("ms"), SECONDS * 1000, "2024-05-06 07:08:09.000"),
        (pyarrow.timestamp("ms", "UTC"), SECONDS * 1000 + 5, "2024-05-06 07:08:09.005Z"),
        (pyarrow.timestamp("us", "Europe/Zurich"), SECONDS * 10**6, "2024-05-06 07:08:09.000000Z"),
        (pyarrow.timestamp("ns", "+02:00"), SECONDS * 10**9 + 1, "2024-05-06 07:08:09.000000001Z"),
        (pyarrow.timestamp("us", "Nowhere/Unknown"), -1, "1969-12-31 23:59:59.999999Z"),  # no database has it
        (pyarrow.date32(), 19_849, "2024-05-06"),
        (pyarrow.time64("us"), 3_600_000_001, "01:00:00.000001"),
    ],
    ids=str,
)
def test_times_arrive_as_text_and_those_of_a_zone_in_utc(
    tmp_path: Path,
    kind: str,
    write: Callable[..., bytes],
    type_: pyarrow.DataType,
    value: int,
    text: str,
) -> None:
    for column in (seen := pyarrow.array([value, None], type_), seen.dictionary_encode()):
        table = pyarrow.table({"text": ["a", "b"], "seen": column})
        found = _read(tmp_path, kind, write(table), metadata=["seen"])
        assert found == [SourceDocument("a", None, {"seen": text}), SourceDocument("b", None, {"seen": None})]


@pytest.mark.parametrize(("kind", "write"), CONTAINERS)
@pytest.mark.parametrize(
    ("field", "value"), [("text_column", "text"), ("id_column", "uuid"), ("metadata", ["score", "lang"])]
)
def test_missing_column_is_named_with_existing_ones(
    tmp_path: Path, kind: str, write: Callable[..., bytes], field: str, value: Any
) -> None:
    name = value[-1] if isinstance(value, list) else value
    with pytest.raises(
        SourceError,
        match=(
            rf"rows\.{kind}'.*: no column '{name}'; there are body, good, key, score, tags, url."
            rf" Fix: correct {field}"
        ),
    ):
        _read(tmp_path, kind, write(TABLE), **{**COLUMNS, field: value})


BAD_ROWS: list[dict[str, Any]] = [
    {},
    {"body": "one", "key": 7, "url": None},  # no score
    {"body": 7, "key": 7, "url": None, "score": 1},
    {"body": "one", "key": 0.5, "url": None, "score": 1},
    {"body": "one", "key": 7, "url": [], "score": 1},
]


@pytest.mark.parametrize("bad", BAD_ROWS, ids=str)
@pytest.mark.parametrize("place", [0, 1, tables.ROWS_WITHOUT - 1, tables.ROWS_WITHOUT + 1])
def test_a_row_of_json_without_its_columns_is_counted(
    tmp_path: Path, bad: dict[str, Any], place: int
) -> None:
    good = {"body": "one", "key": 7, "url": None, "score": 1}
    fields = {**COLUMNS, "metadata": ["url", "score"]}
    for before in ([good] * place, [bad] * min(place, tables.ROWS_WITHOUT - 2)):
        rows = [*before, bad, good]
        found = _read(tmp_path, "jsonl", "\n".join(map(json.dumps, rows)).encode(), **fields)
        assert [isinstance(one, Rejection) and one.reason for one in found] == [
            row is bad and "no_columns" for row in rows
        ]


def test_a_file_none_of_whose_first_rows_has_the_columns_ends_the_stage(tmp_path: Path) -> None:
    good, content = b'{"body": "one"}\n', b'{"text": "one"}\n' * tables.ROWS_WITHOUT
    for rows in (content, content + good, content[: len(content) // 2]):
        with pytest.raises(SourceError, match=r"rows\.jsonl', line 1: no column 'body'; there are text\."):
            _read(tmp_path, "jsonl", rows, text_column="body")


@pytest.mark.parametrize(("kind", "write"), CONTAINERS)
def test_list_is_not_accepted_as_metadata(tmp_path: Path, kind: str, write: Callable[..., bytes]) -> None:
    with pytest.raises(SourceError, match=r"column 'tags' holds .*; metadata are .*Fix: correct metadata"):
        _read(tmp_path, kind, write(TABLE), text_column="body", metadata=["tags"])


@pytest.mark.parametrize(("kind", "write"), CONTAINERS)
@pytest.mark.parametrize("value", [0.25, True, 7, ["x"], {"x": 1}, "text"], ids=str)
def test_columns_of_other_types_are_refused_by_type(
    tmp_path: Path, kind: str, write: Callable[..., bytes], value: Any
) -> None:
    content = write(pyarrow.Table.from_pylist([{"body": "one", "value": value}]))
    roles = {
        "text_column": (str, ", not text"),
        "id_column": ((str, int), "; an identifier is text or an integer"),
        "metadata": ((str, int, float, bool), "; metadata are .*"),
    }
    for field, (allowed, message) in roles.items():
        fields: dict[str, Any] = {"text_column": "body"} | {
            field: ["value"] if field == "metadata" else "value"
        }
        if isinstance(value, allowed) and (field == "metadata" or not isinstance(value, bool)):
            assert len(_read(tmp_path, kind, content, **fields)) == 1
            continue
        with pytest.raises(SourceError, match=rf"column 'value' holds [^;]+{message}\. Fix: correct {field}"):
            _read(tmp_path, kind, content, **fields)


def test_an_entry_of_a_dictionary_is_held_once_however_many_rows_have_it(tmp_path: Path) -> None:
    entries = pyarrow.array(["x" * 2**20, "short"])
    indices = pyarrow.array([0] * 100 + [1, None], pyarrow.int32())
    table = pyarrow.table({"text": pyarrow.DictionaryArray.from_arrays(indices, entries)})
    buffer = io.BytesIO()
    with pyarrow.ipc.new_stream(buffer, table.schema) as writer:
        writer.write_table(table)  # as one batch
    before = pyarrow.default_memory_pool()
    pool = pyarrow.proxy_memory_pool(before)
    pyarrow.set_memory_pool(pool)
    try:
        found = _read(tmp_path, "arrow", buffer.getvalue())
    finally:
        pyarrow.set_memory_pool(before)
    assert found[-1] == Rejection("empty")
    assert [len(one.text) for one in found if isinstance(one, SourceDocument)] == [2**20] * 100 + [5]
    assert pool.max_memory() < 20 * 2**20


def test_two_columns_of_one_name_are_refused(tmp_path: Path) -> None:
    table = pyarrow.Table.from_arrays([pyarrow.array(["a"]), pyarrow.array(["b"])], names=["text", "text"])
    with pytest.raises(SourceError, match="there are 2 columns 'text'"):
        _read(tmp_path, "arrow", _stream(table))


@pytest.mark.parametrize(("kind", "write"), CONTAINERS)
def test_a_file_without_rows_is_counted(tmp_path: Path, kind: str, write: Callable[..., bytes]) -> None:
    assert _read(tmp_path, kind, write(TABLE.slice(0, 0)), **COLUMNS) == [Rejection("empty_file")]


@pytest.mark.parametrize(("kind", "write"), TYPED)
def test_error_names_a_truncated_file(tmp_path: Path, kind: str, write: Callable[..., bytes]) -> None:
    content = write(TABLE.select(["body"]))
    for length in range(len(content)):
        with pytest.raises(
            SourceError, match=rf"cannot read '.*rows\.{kind}' after document [0-4], at about byte \d+: \w+"
        ):
            _read(tmp_path, kind, content[:length], text_column="body")


def test_a_damaged_page_is_found_by_its_checksum(tmp_path: Path) -> None:
    table = pyarrow.table({"text": ["the text of a document"]})
    buffer = io.BytesIO()
    pyarrow.parquet.write_table(
        table,
        buffer,
        compression="none",
        use_dictionary=False,
        write_page_checksum=True,
        write_statistics=False,
    )
    content = buffer.getvalue()
    assert content.count(b"of a document") == 1
    with pytest.raises(SourceError, match="CRC"):
        _read(tmp_path, "parquet", content.replace(b"of a document", b"of 1 document"))


def test_offsets_outside_the_buffer_are_an_error(tmp_path: Path) -> None:
    offsets = pyarrow.array([0, 3, 2**30, 6], pyarrow.int32()).buffers()[1]
    column = pyarrow.Array.from_buffers(pyarrow.string(), 3, [None, offsets, pyarrow.py_buffer(b"abcdef")])
    with pytest.raises(SourceError, match=r"cannot read .* after document 0, .*[Oo]ffset"):
        _read(tmp_path, "arrow", _stream(pyarrow.table({"text": column})))


@pytest.mark.parametrize(("kind", "write"), CONTAINERS)
def test_a_document_of_millions_of_characters_is_one_document(
    tmp_path: Path, kind: str, write: Callable[..., bytes]
) -> None:
    text = "0123456789abcdefghij" * 500_000
    found = _read(tmp_path, kind, write(pyarrow.table({"text": ["before", text, "behind"]})))
    assert [one.text if isinstance(one, SourceDocument) else one for one in found] == [
        "before",
        text,
        "behind",
    ]


def test_parquet_takes_memory_for_a_batch_and_not_for_a_row_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(table_pieces, "PIECE_BYTES", 2**20)
    texts = [f"{number:06d}" * 2000 for number in range(4000)]
    table = pyarrow.table({"text": texts})
    pages = {"compression": "none", "use_dictionary": False, "data_page_size": 2**18, "write_batch_size": 16}
    pyarrow.parquet.write_table(table, tmp_path / "rows.parquet", **pages)
    del table
    source = SourceSpec(url=str(tmp_path), format="parquet")
    before, most = pyarrow.total_allocated_bytes(), 0
    for number, found in enumerate(read_documents(source, *open_source(source), "rows.parquet")):
        assert isinstance(found, SourceDocument)
        assert found.text == texts[number]
        most = max(most, pyarrow.total_allocated_bytes() - before)
    assert number == 3999
    assert most < 2**23 < 4000 * 12_000


@given(
    content=st.binary(max_size=60).map(lambda data: data.replace(b"\x00", b"\n")),
    size=st.integers(1, 9),
    most=st.integers(1, 9),
)
def test_lines_do_not_depend_on_the_size_of_the_reads(content: bytes, size: int, most: int) -> None:
    read, tables.READ_BYTES = tables.READ_BYTES, size
    try:
        lines = list(tables.read_lines(io.BytesIO(content), most))
    finally:
        tables.READ_BYTES = read
    expected = content.split(b"\n")
    if not expected[-1]:
        del expected[-1]
    assert lines == [line if len(line) <= most else Rejection("too_large") for line in expected]
