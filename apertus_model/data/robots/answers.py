"""Answers to requests for robots.txt in stored snapshots.

Invariants:
- An answer is a function of its row or record. The content that counts is cut to `READ_BYTES`, also that
  of a compressed answer, so memory is bounded by a row of a table or a record of an archive.
- A row or record without a usable answer (a broken record, a row that is not UTF-8 or lacks columns, an
  address that is not of a robots.txt, a redirect) is left out. A file that cannot be read to its end, or has
  no row with the columns, is a SourceError.
"""

import io
from collections.abc import Iterator
from datetime import UTC, datetime
from functools import partial
from typing import Any, BinaryIO, NamedTuple

from apertus_model.data.documents.addresses import parse
from apertus_model.data.documents.parsed import FoundDocuments, NotAsStated, SourceDocument
from apertus_model.data.documents.readers import TABLE_PARSERS, open_source, read_file
from apertus_model.data.documents.web import records
from apertus_model.data.robots.rules import READ_BYTES, read_part
from infra.store.inputs import SourceError, list_source
from specs.robots import COLUMNS, RobotsSource
from specs.sources import SourceSpec

UNDATED = -(2**63)
PATHS = ("/", "/robots.txt")


class RobotsAnswer(NamedTuple):
    """The answer of a host. `content` is None if everything is allowed (4xx), and for an error."""

    origin: str  # `Address.origin`
    error: bool
    date: int  # microseconds since 1970; UNDATED if no date is stated
    content: bytes | None


def answers(source: RobotsSource) -> Iterator[RobotsAnswer]:
    """All answers of a snapshot, in the order of its files."""
    files = source.files
    fs, root = open_source(files)
    parse_file = _archive if source.format == "warc" else partial(_table, source)
    for file in list_source(files).files:
        for answer in read_file(files, fs, root, file.path, parse_file):
            if answer is not None:
                yield answer


def _answer(url: str, status: int | None, date: int, content: bytes | None) -> RobotsAnswer | None:
    """The answer, or None if it says nothing about robots.txt."""
    address = parse(url)
    if address is None or address.path not in PATHS:
        return None
    if status is None:
        status = 0 if content is None else 200
    if 300 <= status < 400:
        return None
    if 200 <= status < 300 and content is not None:
        return RobotsAnswer(address.origin, False, date, read_part(content))
    return RobotsAnswer(address.origin, not 400 <= status < 500, date, None)


def _table(source: RobotsSource, file: BinaryIO, files: SourceSpec) -> Iterator[RobotsAnswer | None]:
    """The answers in the rows of a table; the text of a row is the address."""
    for row in _rows(file, files):
        if not isinstance(row, SourceDocument):
            yield None
            continue
        content = row.metadata[source.text_column]
        if content is not None and not isinstance(content, str):
            raise NotAsStated(
                f"column '{source.text_column}' holds {content!r}, not text", "correct text_column"
            )
        status = _whole_number(source.status_column, row.metadata)
        date = _date(source.date_column, row.metadata)
        yield _answer(row.text, status, date, None if content is None else content.encode())


def _rows(file: BinaryIO, files: SourceSpec) -> FoundDocuments:
    try:
        yield from TABLE_PARSERS[files.format](file, files)
    except NotAsStated as error:
        fix = f"correct {', '.join(COLUMNS[:-1])} or {COLUMNS[-1]}"
        raise NotAsStated(error.problem, fix, error.place) from error


def _whole_number(column: str | None, values: dict[str, Any]) -> int | None:
    value = None if column is None else values[column]
    if value is None:
        return None
    try:
        return int(value)
    except (ValueError, TypeError, OverflowError):
        raise NotAsStated(
            f"column '{column}' holds {str(value)[:80]!r}, not a status", "correct status_column"
        ) from None


def _date(column: str | None, values: dict[str, Any]) -> int:
    value = None if column is None else values[column]
    if value is None or value == "":
        return UNDATED
    try:
        return _microseconds(str(value))
    except ValueError:
        raise NotAsStated(
            f"column '{column}' holds {str(value)[:80]!r}, not a time in ISO 8601", "correct date_column"
        ) from None


def _microseconds(text: str) -> int:
    """The microseconds from 1970 to a time in ISO 8601. ValueError for any other text."""
    # Python reads at most six digits of a second, Arrow writes nine.
    whole, point, rest = text.strip().partition(".")
    digits = rest[: len(rest) - len(rest.lstrip("0123456789"))]
    time = datetime.fromisoformat(f"{whole}{point}{digits[:6]}{rest[len(digits) :]}")
    time = time.replace(tzinfo=UTC) if time.tzinfo is None else time
    since = time - datetime(1970, 1, 1, tzinfo=UTC)
    return (since.days * 86_400 + since.seconds) * 10**6 + since.microseconds


def _archive(file: BinaryIO, files: SourceSpec) -> Iterator[RobotsAnswer | None]:
    """The answers in the records of type `response`."""
    try:
        from warcio.recordloader import ArcWarcRecordLoader
    except ImportError as error:
        raise SourceError(f"web archives need warcio ({error}). Fix: pip install 'apertus[web]'") from error
    loader = ArcWarcRecordLoader(verify_http=False)
    for record in records(file, files.max_document_bytes):
        if record.kind == "response" and record.content is not None:
            yield _record(loader, record.content)


def _record(loader: Any, content: bytes) -> RobotsAnswer | None:
    try:
        parsed = loader.parse_record_stream(io.BytesIO(content))
        url = parsed.rec_headers.get_header("WARC-Target-URI")
        date = _microseconds(parsed.rec_headers.get_header("WARC-Date"))
        status = int(parsed.http_headers.get_statuscode())
    except Exception:  # what servers send breaks the parser in many ways
        return None
    try:
        # decompressed if it was compressed; one byte more, since longer content loses its last line
        body = parsed.content_stream().read(READ_BYTES + 1)
    except Exception:  # the body can be as broken as the head
        return _answer(url, 0, date, None)
    return _answer(url, status, date, body)
