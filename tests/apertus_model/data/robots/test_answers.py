"""Stored answers to requests for robots.txt, in every form."""

from __future__ import annotations

import gzip
import io
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from apertus_model.data.robots.answers import UNDATED, RobotsAnswer, answers
from apertus_model.data.robots.rules import READ_BYTES
from infra.store.inputs import SourceError
from specs.robots import RobotsSource

CLOSED = "User-agent: *\nDisallow: /\n"
JANUARY = 1_735_689_600_000_000  # 2025-01-01T00:00:00Z in microseconds
ALL = {"status_column": "status", "date_column": "date"}


def _source(folder: Path, format: str, **fields: Any) -> RobotsSource:
    return RobotsSource.model_validate({"url": str(folder), "format": format, **fields})


def _jsonl(folder: Path, rows: list[dict[str, Any]], name: str = "a.jsonl") -> Path:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


ROWS = [
    {"url": "https://a.example/robots.txt", "status": 200, "text": CLOSED, "date": "2025-01-01T00:00:00Z"},
    {"url": "http://b.example:8080", "status": 404, "text": "<html>", "date": "2025-01-01 01:00:00+01:00"},
    {"url": "c.example", "status": 503, "text": None, "date": "2025-01-01"},
    {"url": "d.example", "status": None, "text": None, "date": None},
    {"url": "e.example", "status": None, "text": "", "date": ""},
    {"url": "https://a.example/robots.txt", "status": 301, "text": "", "date": None},  # a redirect
    {"url": "https://a.example/other.txt", "status": 200, "text": CLOSED, "date": None},
    {"url": "no host", "status": 200, "text": CLOSED, "date": None},
]
EXPECTED = [
    RobotsAnswer("https://a.example", False, JANUARY, CLOSED.encode()),
    RobotsAnswer("http://b.example:8080", False, JANUARY, None),
    RobotsAnswer("https://c.example", True, JANUARY, None),
    RobotsAnswer("https://d.example", True, UNDATED, None),
    RobotsAnswer("https://e.example", False, UNDATED, b""),
]


def test_tables_of_every_kind_hold_the_same_answers(tmp_path: Path) -> None:
    assert list(answers(_source(_jsonl(tmp_path / "jsonl", ROWS), "jsonl", **ALL))) == EXPECTED
    (tmp_path / "parquet").mkdir()
    pq.write_table(pa.Table.from_pylist(ROWS), tmp_path / "parquet" / "a.parquet")
    assert list(answers(_source(tmp_path / "parquet", "parquet", **ALL))) == EXPECTED
    (tmp_path / "jsonl" / "a.jsonl.gz").write_bytes(
        gzip.compress((tmp_path / "jsonl" / "a.jsonl").read_bytes())
    )
    assert list(answers(_source(tmp_path / "jsonl", "jsonl", **ALL))) == EXPECTED * 2


def test_columns_can_have_other_names_and_types(tmp_path: Path) -> None:
    table = pa.table(
        {
            "site": ["a.example", "b.example"],
            "content": [CLOSED, None],
            "fetched": pa.array([JANUARY * 1000, None], pa.timestamp("ns", tz="UTC")),
        }
    )
    pq.write_table(table, tmp_path / "a.parquet")
    names = {"url_column": "site", "text_column": "content", "date_column": "fetched"}
    assert list(answers(_source(tmp_path, "parquet", **names))) == [
        RobotsAnswer("https://a.example", False, JANUARY, CLOSED.encode()),
        RobotsAnswer("https://b.example", True, UNDATED, None),
    ]


def _archive(records: list[tuple[str, str, str, bytes, dict[str, str]]], compress: bool = False) -> bytes:
    """An archive written by warcio: (type, address, status line, body, headers of HTTP)."""
    from warcio.statusandheaders import StatusAndHeaders
    from warcio.warcwriter import WARCWriter

    file = io.BytesIO()
    writer = WARCWriter(file, gzip=compress)
    for kind, url, status, body, headers in records:
        http = StatusAndHeaders(status, list(headers.items()), protocol="HTTP/1.1") if status else None
        record = writer.create_warc_record(
            url,
            kind,
            payload=io.BytesIO(body),
            http_headers=http,
            warc_headers_dict={"WARC-Date": "2025-01-01T00:00:00Z"},
        )
        writer.write_record(record)
    return file.getvalue()


def test_responses_of_an_archive_are_answers(tmp_path: Path) -> None:
    pytest.importorskip("warcio")
    large = b"User-agent: *\nDisallow: /early\n" + b"# filler\n" * 1_200_000 + b"Disallow: /late\n"
    assert len(large) > 10 * 2**20
    records = [
        ("request", "https://a.example/robots.txt", "GET /robots.txt", b"", {}),
        ("response", "https://a.example/robots.txt", "200 OK", CLOSED.encode(), {}),
        (
            "response",
            "http://b.example/robots.txt",
            "200 OK",
            gzip.compress(b"User-agent: b\n"),
            {"Content-Encoding": "gzip"},
        ),
        ("response", "http://c.example/robots.txt", "404 Not Found", b"<html>", {}),
        ("response", "http://d.example/robots.txt", "500 Oops", b"", {}),
        ("response", "http://e.example/robots.txt", "302 Found", b"", {"Location": "/x"}),
        ("response", "http://f.example/robots.txt", "200 OK", large, {}),
        ("response", "http://g.example/robots.txt", "garbage", b"", {}),
        ("response", "http://h.example/robots.txt", "200 OK", b"\xff\x00\xfe" * 99, {}),
    ]
    for compress, name in ((False, "a.warc"), (True, "a.warc.gz")):
        folder = tmp_path / name
        folder.mkdir()
        (folder / name).write_bytes(_archive(records, compress))
        found = {answer.origin: answer for answer in answers(_source(folder, "warc"))}
        assert {origin: (answer.error, answer.content) for origin, answer in found.items()} == {
            "https://a.example": (False, CLOSED.encode()),
            "http://b.example": (False, b"User-agent: b\n"),
            "http://c.example": (False, None),
            "http://d.example": (True, None),
            "http://h.example": (False, b"\xff\x00\xfe" * 99),
        } | {"http://f.example": (False, large[: large[:READ_BYTES].rfind(b"\n") + 1])}
        assert {answer.date for answer in found.values()} == {JANUARY}


def test_an_archive_that_is_cut_off_is_named(tmp_path: Path) -> None:
    pytest.importorskip("warcio")
    content = _archive(
        [("response", f"https://{i}.example/robots.txt", "200 OK", CLOSED.encode(), {}) for i in range(3)]
    )
    (tmp_path / "cut.warc").write_bytes(content[: len(content) // 2])
    with pytest.raises(SourceError, match=r"cannot read '.*cut\.warc' after document 1.*truncated"):
        list(answers(_source(tmp_path, "warc")))


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (
            {**ROWS[0], "status": "fine"},
            "column 'status' holds 'fine', not a status. Fix: correct status_column",
        ),
        ({**ROWS[0], "date": "20 January"}, "column 'date' holds '20 January', not a time in ISO 8601"),
        ({**ROWS[0], "text": 7}, "column 'text' holds 7, not text"),
    ],
)
def test_a_row_that_contradicts_the_spec_is_named(tmp_path: Path, row: dict[str, Any], message: str) -> None:
    with pytest.raises(SourceError, match=message):
        list(answers(_source(_jsonl(tmp_path / "s", [ROWS[0], row]), "jsonl", **ALL)))


def test_a_row_without_its_columns_is_left_out_and_a_file_of_such_rows_is_named(tmp_path: Path) -> None:
    other = {"text": CLOSED}
    folders = [_jsonl(tmp_path / "a", ROWS[:1]), _jsonl(tmp_path / "b", [other, ROWS[0], other])]
    first, second = (list(answers(_source(folder, "jsonl", **ALL))) for folder in folders)
    assert first == second != []
    with pytest.raises(
        SourceError, match=r"a\.jsonl', line 1: no column 'url'.*Fix: correct url_column, text_column"
    ):
        list(answers(_source(_jsonl(tmp_path / "t", [other, other]), "jsonl", **ALL)))


def test_a_file_with_another_schema_half_way_is_named(tmp_path: Path) -> None:
    pq.write_table(pa.table({"url": ["a.example"], "text": [CLOSED]}), tmp_path / "0.parquet")
    pq.write_table(pa.table({"domain": ["b.example"], "text": [CLOSED]}), tmp_path / "1.parquet")
    with pytest.raises(
        SourceError, match=r"1\.parquet': no column 'url'; there are domain, text\. Fix: correct url_column"
    ):
        list(answers(_source(tmp_path, "parquet")))
    pq.write_table(pa.table({"url": ["b.example"], "text": [b"bytes"]}), tmp_path / "1.parquet")
    with pytest.raises(SourceError, match=r"1\.parquet': column 'text' holds binary"):
        list(answers(_source(tmp_path, "parquet")))


def test_lines_that_are_no_rows_are_left_out(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'\xff\xfe\n{"url"\n[]\n{"url": "a.example", "text": "\\ud800"}\n')
    assert list(answers(_source(tmp_path, "jsonl"))) == []
