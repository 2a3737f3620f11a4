"""Documents of web archives (WARC, ISO 28500): pages of HTML (`response`), and text extracted by a crawler
(`conversion`, WET).

Invariants:
- Records are framed here strictly, and `process_record` of datatrove gets each record whole. Its WarcReader
  uses warcio, which accepts a truncated file.
- A record of those two types is a document or a counted rejection; one of type `resource` (a file that was
  not served over HTTP, which datatrove does not read) is a rejection; records of other types are ignored.
- Text is a function of the page alone: trafilatura runs without memory of other pages or a time limit.
- Memory is bounded by a record of `max_document_bytes`, compressed or not. Common Crawl cuts pages at 5 MiB.
"""

import importlib
import io
import logging
from collections.abc import Callable, Iterator
from functools import partial
from typing import BinaryIO, NamedTuple

from apertus_model.data.documents.parsed import TOO_LARGE, Damaged, FoundDocuments, Rejection, SourceDocument
from infra.store.inputs import SourceError
from specs.sources import SourceSpec

LINE_BYTES = 2**20
PAGES = ("response", "conversion")
NEEDED = ("warcio", "trafilatura", "cchardet", "magic")


class ArchiveRecord(NamedTuple):
    """One record of an archive."""

    kind: str  # its WARC-Type
    content: bytes | None  # head and block as in the file; None if the block is too large or not asked for


def warc(file: BinaryIO, source: SourceSpec) -> FoundDocuments:
    """The pages of an archive, with `url` and `date` as metadata, in the order of the file."""
    text_of_page = _extractor(source.html)
    from datatrove.pipeline.readers.warc import process_record
    from warcio.recordloader import ArcWarcRecordLoader

    loader = ArcWarcRecordLoader(verify_http=False)
    most = source.max_document_bytes
    for record in records(file, most):
        if record.kind == "resource":
            yield Rejection("resource")
        if record.kind not in PAGES:
            continue
        if record.content is None:
            yield Rejection(TOO_LARGE)
            continue
        try:
            parsed = loader.parse_record_stream(io.BytesIO(record.content))
            content = parsed.content_stream().read(most + 1)  # decompressed if it was compressed
            parsed.content_stream = partial(io.BytesIO, content)
            page = process_record(parsed) if len(content) <= most else None
        except Exception:  # what servers send breaks the parser in many ways
            yield Rejection("bad_record")
            continue
        if page is None:
            yield Rejection("not_html" if len(content) <= most else TOO_LARGE)
            continue
        text = page["text"].removeprefix("\ufeff")
        try:
            text = text_of_page(text) if record.kind == "response" else text
        except Exception:  # pages break the extractor in as many ways
            yield Rejection("extraction_failed")
            continue
        if not text or not text.strip():
            yield Rejection("empty")
        else:
            yield SourceDocument(text, page["id"], {"url": page["url"], "date": page["date"]})


def _extractor(html: str) -> Callable[[str], str | None]:
    """A function that extracts the text of a page. SourceError when a library is missing."""
    try:
        for name in NEEDED:
            importlib.import_module(name)
    except ImportError as error:
        raise SourceError(
            f"web archives need {', '.join(NEEDED)} ({error}). "
            "Fix: pip install 'apertus[web]', and the system's libmagic: apt-get install libmagic1"
        ) from error
    if html == "raw":
        return lambda page: page
    from datatrove.pipeline.extractors import Trafilatura

    logging.getLogger("trafilatura").setLevel(logging.CRITICAL)  # a page without text is counted
    return Trafilatura(deduplicate=False).extract


def records(file: BinaryIO, most: int) -> Iterator[ArchiveRecord]:
    """The records of an archive. Raises EOFError when a record is cut off, Damaged when something else is
    found where a record should begin or end. `most`: bytes of a block that is read."""
    start = 0
    while line := file.readline(LINE_BYTES):
        if not line.startswith(b"WARC/"):
            raise Damaged(f"byte {start} begins with {line[:24]!r}, not with a WARC record")
        head, kind, length = [line], "", None
        while head[-1].strip():
            line = file.readline(LINE_BYTES)
            if not line.endswith(b"\n"):
                raise EOFError(f"the record at byte {start} is truncated in its head")
            head.append(line)
            name, _, value = line.partition(b":")
            if name.strip().lower() == b"warc-type":
                kind = value.strip().decode("latin-1").lower()
            elif name.strip().lower() == b"content-length":
                length = int(value) if value.strip().isdigit() else None
        if length is None:
            raise Damaged(f"the record at byte {start} states no length")
        wanted = length <= most and kind in PAGES
        block = file.read(length) if wanted else b""
        received = len(block) if wanted else _skip(file, length)
        end = file.read(4) if received == length else b""
        if received < length or (b"\r\n\r\n".startswith(end) and len(end) < 4):
            raise EOFError(f"the record at byte {start} is truncated: it has {received} of {length} bytes")
        if end != b"\r\n\r\n":
            raise Damaged(f"the record at byte {start} does not end after its {length} bytes")
        yield ArchiveRecord(kind, b"".join([*head, block]) if wanted else None)
        start += sum(map(len, head)) + length + 4


def _skip(file: BinaryIO, length: int) -> int:
    """Skips bytes; returns their number."""
    left = length
    while left and (chunk := file.read(min(left, LINE_BYTES))):
        left -= len(chunk)
    return length - left
