from __future__ import annotations

import gzip
import io
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("magic", exc_type=ImportError, reason="no libmagic: apt-get install libmagic1")
warcwriter = pytest.importorskip("warcio.warcwriter")
StatusAndHeaders = pytest.importorskip("warcio.statusandheaders").StatusAndHeaders

from apertus_model.data.documents.parsed import Rejection, SourceDocument  # noqa: E402
from apertus_model.data.documents.readers import open_source, read_documents  # noqa: E402
from infra.store.inputs import SourceError  # noqa: E402
from specs.sources import SourceSpec  # noqa: E402
from tests.apertus_model.data.documents.remote import RemoteFiles  # noqa: E402

PARAGRAPHS = [
    f"The river has {count} bridges of stone, and each was built by another guild of the town in the years"
    " behind the great flood."
    for count in ("three", "seven", "twenty")
]
BODY = "".join(f"<p>{paragraph}</p>" for paragraph in PARAGRAPHS)
PAGE = f"<html><body><nav><a href='/'>Menu</a></nav><article><h1>Bridges</h1>{BODY}</article></body></html>"


class Archive:
    """An archive written by warcio; `borders` are the ends of its records."""

    def __init__(self, compress: bool = False) -> None:
        self.file = io.BytesIO()
        self.writer = warcwriter.WARCWriter(self.file, gzip=compress)
        self.borders = [0]

    def add(self, kind: str, number: int, payload: bytes, *headers: tuple[str, str], **warc: str) -> Archive:
        http = StatusAndHeaders("200 OK", list(headers), protocol="HTTP/1.1") if kind == "response" else None
        extra = {"WARC-Date": f"2024-01-0{number + 1}T00:00:00Z", "WARC-Record-ID": f"<urn:uuid:{number}>"}
        if kind == "conversion":
            extra["WARC-Identified-Payload-Type"] = "text/plain"
        record = self.writer.create_warc_record(
            f"https://site.example/{number}",
            kind,
            payload=io.BytesIO(payload),
            http_headers=http,
            warc_headers_dict={**extra, **warc},
        )
        self.writer.write_record(record)
        self.borders.append(self.file.tell())
        return self

    def bytes(self) -> bytes:
        return self.file.getvalue()


def _read(
    folder: Path, content: bytes, name: str = "a.warc", **fields: Any
) -> list[SourceDocument | Rejection]:
    (folder / name).write_bytes(content)
    source = SourceSpec(url=str(folder), format="warc", **fields)
    return list(read_documents(source, *open_source(source), name))


def test_a_page_is_a_document_with_its_address_and_date(tmp_path: Path) -> None:
    archive = (
        Archive()
        .add("request", 0, b"GET / HTTP/1.1\r\n\r\n")
        .add("response", 1, PAGE.encode(), ("Content-Type", "text/html"))
    )
    (found,) = _read(tmp_path, archive.bytes())
    assert isinstance(found, SourceDocument)
    assert found.text.splitlines() == ["Bridges", *PARAGRAPHS]
    assert found.id == "<urn:uuid:1>"
    assert found.metadata == {"url": "https://site.example/1", "date": "2024-01-02T00:00:00Z"}


def test_page_can_be_read_raw(tmp_path: Path) -> None:
    squeezed = gzip.compress(PAGE.encode())
    archive = (
        Archive().add("response", 0, PAGE.encode()).add("response", 1, squeezed, ("Content-Encoding", "gzip"))
    )
    assert [
        found.text
        for found in _read(tmp_path, archive.bytes(), html="raw")
        if isinstance(found, SourceDocument)
    ] == [PAGE, PAGE]


def test_text_records_of_a_crawler_are_read_unchanged(tmp_path: Path) -> None:
    archive = Archive().add("conversion", 0, "Plain text, ż.\n".encode())
    assert [
        found.text for found in _read(tmp_path, archive.bytes()) if isinstance(found, SourceDocument)
    ] == ["Plain text, ż.\n"]


@pytest.mark.parametrize("compress", [False, True])
def test_an_archive_on_a_remote_file_system_is_read(tmp_path: Path, compress: bool) -> None:
    archive = Archive(compress).add("metadata", 0, b"about it").add("response", 1, PAGE.encode())
    here = _read(tmp_path, archive.bytes())
    source = SourceSpec(url=str(tmp_path), format="warc")
    assert list(read_documents(source, RemoteFiles(), str(tmp_path), "a.warc")) == here
    assert [type(document) for document in here] == [SourceDocument]


def test_pages_without_text_are_counted(tmp_path: Path) -> None:
    archive = (
        Archive().add("warcinfo", 0, b"software: x\r\n").add("response", 1, b"\x89PNG\r\n\x1a\n" + bytes(100))
    )
    archive.add("response", 2, b"<html><body></body></html>").add("response", 3, PAGE.encode() * 50).add(
        "response", 4, PAGE.encode()
    )
    archive.add("response", 5, gzip.compress(PAGE.encode() * 50), ("Content-Encoding", "gzip")).add(
        "resource", 6, PAGE.encode()
    )
    found = _read(tmp_path, archive.bytes(), max_document_bytes=5000)
    assert found[:3] == [Rejection("not_html"), Rejection("empty"), Rejection("too_large")]
    assert isinstance(found[3], SourceDocument)
    assert found[4:] == [Rejection("too_large"), Rejection("resource")]
    assert _read(tmp_path, Archive().add("warcinfo", 0, b"software: x\r\n").bytes()) == [
        Rejection("empty_file")
    ]


def test_the_text_of_a_page_does_not_depend_on_the_pages_before(tmp_path: Path) -> None:
    archive = Archive()
    for number in range(6):
        archive.add("response", number, PAGE.encode())
    texts = [found.text for found in _read(tmp_path, archive.bytes()) if isinstance(found, SourceDocument)]
    assert texts == ["\n".join(["Bridges", *PARAGRAPHS])] * 6


@pytest.mark.parametrize("compress", [False, True])
def test_an_archive_that_is_cut_off_inside_a_record_is_an_error(tmp_path: Path, compress: bool) -> None:
    archive = (
        Archive(compress)
        .add("response", 0, PAGE.encode())
        .add("metadata", 1, b"about it")
        .add("response", 2, PAGE.encode())
    )
    name = "a.warc.gz" if compress else "a.warc"
    whole = _read(tmp_path, archive.bytes(), name, html="raw")
    for length in [
        *range(1, archive.borders[-1], 7),
        *(border + shift for border in archive.borders[1:] for shift in (-4, -3, -1, 0)),
    ]:
        if length in archive.borders:
            # Nothing in the format says how many records there should be.
            count = [0, 1, 1, 2][archive.borders.index(length)]
            assert _read(tmp_path, archive.bytes()[:length], name, html="raw") == whole[:count]
            continue
        with pytest.raises(
            SourceError, match=rf"cannot read '.*{name}' after document [012], at about byte \d+: \w+: "
        ):
            _read(tmp_path, archive.bytes()[:length], name, html="raw")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"<html>no archive</html>", "byte 0 begins with b'<html>no archive</html>'"),
        (b"WARC/1.0\r\nWARC-Type: response\r\n\r\n", "the record at byte 0 states no length"),
        (
            b"WARC/1.0\r\nContent-Length: 2\r\n\r\nabcdefgh",
            "the record at byte 0 does not end after its 2 bytes",
        ),
    ],
)
def test_error_about_a_broken_archive_names_the_byte(tmp_path: Path, content: bytes, message: str) -> None:
    with pytest.raises(SourceError, match=message):
        _read(tmp_path, content)


def test_missing_libraries_are_named_with_their_extra(tmp_path: Path) -> None:
    program = (
        "import sys\n"
        "sys.modules['warcio'] = None\n"
        "from apertus_model.data.documents.readers import open_source, read_documents\n"
        "from infra.store.inputs import SourceError\n"
        "from specs.sources import SourceSpec\n"
        f"source = SourceSpec(url={str(tmp_path)!r}, format='warc')\n"
        "try:\n"
        "    list(read_documents(source, *open_source(source), 'a.warc'))\n"
        "except SourceError as error:\n"
        "    print(error)\n"
    )
    (tmp_path / "a.warc").write_bytes(b"")
    printed = subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, text=True, timeout=60
    ).stdout
    assert "pip install 'apertus[web]'" in printed
