"""Contains the store: its layout, and access to files that are checked.

Layout, below the store's URL:

    format.json                                the version of this layout
    inputs/<key>.json                          digests of documents outside the store, by listing
                                               (`infra.store.inputs`)
    inputs/<digest>.files.jsonl                the files behind such a digest, with size and SHA-256 each
    protected/<kind>-<fingerprint>[-<step>].json   a protected stage had finished there
    reports/<pipeline>/<flow run>.html         the report of a deployed run, for people
    runs/<pipeline>/<time>-<id>.json           which artifacts a run of a spec referred to
    <kind>/<fingerprint>/identity.json         what was hashed, written when the first attempt begins
    <kind>/<fingerprint>/manifest.json         written last: the artifact is complete (training:
                                               manifest-<step>.json)
    <kind>/<fingerprint>/checkpoints/<step>.json   written last: that checkpoint is complete
    <kind>/<fingerprint>/references/<step>-<id>.json   another artifact starts from that checkpoint
                                                       (`infra.store.writing.retention`)
    <kind>/<fingerprint>/units/<key>.json      written last: that unit of work is complete
    <kind>/<fingerprint>/attempts/<id>/...     the files; an attempt never touches another one's
    <kind>/<fingerprint>/logs/<id>.txt         what an attempt printed
    <kind>/<fingerprint>/leases/...            who works at it (`infra.store.writing.lease`)
    damaged/<time>/...                         markers that `apertus verify --fix` took away

Invariants: what no marker names is never read. A marker names every file with size and digests
(`infra.store.records`), which were computed while the file was written (`infra.store.files.writer`) and are
compared when it is read (`infra.store.files.reader`); a document has a checksum of its own content
(`infra.store.documents`). A committed file is never rewritten; a marker appears whole or not at all, and the
first writer wins. The filesystem is called only through `infra.store.storage.filesystem`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import fsspec
from fsspec.implementations.local import LocalFileSystem
from pydantic import BaseModel

from infra.store.documents import Format, check, to_json, unsealed, with_checksum
from infra.store.files.reader import CheckedFile
from infra.store.files.sinks import PART_BYTES
from infra.store.files.writer import Writer
from infra.store.records import PIECE_BYTES, DamagedError, FileRecord, StoreError
from infra.store.storage.access import check_settings, fix_of
from infra.store.storage.filesystem import Filesystem
from infra.store.storage.retry import Retry
from specs.foreign import MAX_BYTES, ForeignError, M, check_length, checked, parse_json, shown, trail
from specs.redaction import without_credentials

FORMAT = 3
PROTECTED = "protected"
CHUNK = 4 * 2**20
LONGEST = 200  # characters of a client's error in a message
TIMEOUTS = {"connect_timeout": 10, "read_timeout": 30}  # of S3, in seconds; `Retry` tries again


class Store(Filesystem):
    """A folder on an fsspec filesystem with the layout above; `piece_bytes`: of files written here."""

    def __init__(
        self,
        fs: fsspec.AbstractFileSystem,
        root: str,
        *,
        retry: Retry | None = None,
        piece_bytes: int = PIECE_BYTES,
    ) -> None:
        assert PART_BYTES % piece_bytes == 0, "a part is whole pieces"
        super().__init__(fs, root, retry=retry)
        self.piece_bytes = piece_bytes
        self.without_checksum: set[str] = set()  # documents that were read so

    @classmethod
    def open(cls, url: str) -> Store:
        """Connects, and checks the version of the layout. StoreError for a store of another version."""
        try:
            without_credentials(url)
        except ValueError as error:
            raise StoreError(f"the store has {error}") from None
        try:
            check_settings(url)
            fs, root = fsspec.core.url_to_fs(url, **_options(url))
        except (ValueError, ImportError, OSError) as error:
            raise StoreError(f"cannot open the store '{url}': {error}") from error
        if isinstance(fs, LocalFileSystem):
            try:
                root = str(Path(root).expanduser().resolve())
            except (RuntimeError, OSError, ValueError) as error:  # no such user, a loop of links, a NUL
                raise StoreError(f"cannot open the store {shown(url)}: {error}") from error
        if hasattr(fs, "call_s3"):
            fs.retries = 1  # of s3fs; our own `Retry` is around it, and logs
            if not root:
                raise StoreError(f"cannot open the store '{url}': it names no bucket")
        store = cls(fs, root)
        try:
            store.check_format(url)
        except Exception as error:
            if (fix := fix_of(error, url)) is None:
                raise
            reason = " ".join(str(error).split())[:LONGEST].rstrip(".")
            raise StoreError(f"cannot open the store '{url}': {reason}. Fix: {fix}") from error
        return store

    def format(self) -> Format | None:
        """The content of `format.json`; None for a new store. DamagedError for any other content."""
        document = self.read_json_if_there("format.json")
        try:
            return None if document is None else checked(Format, document)
        except ForeignError as error:
            raise self.damaged("format.json", error) from error

    def check_format(self, name: str) -> None:
        """StoreError for a store of another format than this program's; `name` is its URL for the message."""
        present = self.format()
        if present is None or present == Format(format=FORMAT):
            return
        newer = "a newer release of this program, or " if present.format > FORMAT else ""
        formats = f"has format {present.format}, this program reads format {FORMAT}"
        raise StoreError(f"the store '{name}' {formats}. Fix: use {newer}a new store (--store)")

    def initialise(self) -> None:
        """Writes the version marker of a new store."""
        if not self.exists("format.json"):
            self.write_once("format.json", to_json(Format(format=FORMAT)))

    def damaged(self, path: str, problem: Exception | str) -> DamagedError:
        if path == "format.json":
            fix = f'replace it with a file that contains {{"format": {FORMAT}}}'
        elif path.startswith(f"{PROTECTED}/"):  # withdrawn, it would protect nothing any more
            fix = "delete it, then repeat `apertus run` of its recipe, which writes it again"
        else:
            return super().damaged(path, problem)
        return DamagedError(f"{self.where(path)} is damaged: {problem}; {fix}")

    def read_json(self, path: str) -> Any:
        """The content of a marker. DamagedError when the marker is missing, or is not JSON."""
        if (content := self.read_document(path)) is None:
            raise self.missing(path)
        return content[1]

    def read_json_if_there(self, path: str) -> Any | None:
        """The content of a marker, or None when the marker is missing."""
        content = self.read_document(path)
        return None if content is None else content[1]

    def document(self, path: str, model: type[M]) -> M:
        """A marker as its model. DamagedError when it is missing, or does not fit."""
        return check(model, self.read_json(path), self.where(path))

    def read_document(self, path: str) -> tuple[bytes, Any] | None:
        """The bytes of a marker and their parsed content without its checksum, or None when the marker is
        missing. DamagedError when it is not JSON, or its content does not match its checksum."""
        trail.append(self.where(path))

        def ask() -> tuple[bytes, Any] | None:
            data = None
            try:
                if self.is_local:
                    check_length(self.size(path) or 0, MAX_BYTES)
                data = self.read_if_there(path)
                return None if data is None else (data, self.unsealed(path, parse_json(data)))
            except ForeignError as error:
                if data is not None:
                    self.check_whole(path, data)
                raise self.damaged(path, error) from error

        return self.call(f"reading '{path}'", ask, size=None)

    def unsealed(self, path: str, document: Any) -> Any:
        """A parsed document (in a list: one of them) without its checksum, which is compared. ForeignError
        when it does not match; without one, `without_checksum` has the path from now on."""
        content, checked_here = unsealed(document)
        if not checked_here and path != "format.json":
            self.without_checksum.add(path)
        return content

    def write_document(self, path: str, document: BaseModel) -> bool:
        """Writes a document with its checksum, once, as `write_once` does."""
        return self.write_once(path, with_checksum(to_json(document)))

    def reader(self, path: str, record: FileRecord) -> CheckedFile:
        """A file that a marker names, to be read whole or in parts, and checked. Nothing is read yet."""
        return CheckedFile(self, path, record)

    def writer(self, path: str) -> Writer:
        """A context manager with `write(bytes)`; after it is closed, `.record` is what the marker has to
        state. Nothing is left of a file whose block ended with an exception."""
        return Writer(self, path, self.piece_bytes)

    def upload(self, source: Path, path: str) -> FileRecord:
        """Copies a local file into the store and returns its record."""
        with open(source, "rb") as file, self.writer(path) as target:
            while part := file.read(PIECE_BYTES):
                target.write(part)
        return target.record

    def write_bytes(self, path: str, data: bytes) -> FileRecord:
        """Writes a file of an attempt and returns its record."""
        with self.writer(path) as target:
            target.write(data)
        return target.record


def _options(url: str) -> dict[str, Any]:
    """The options that a filesystem is opened with. Those of the environment
    (`FSSPEC_S3='{"config_kwargs": {...}}'`, `FSSPEC_S3_<OPTION>`) win."""
    protocol = url.split("://", 1)[0]
    if protocol not in ("s3", "s3a"):
        return {}
    chosen = {**fsspec.config.conf.get("s3", {}), **fsspec.config.conf.get(protocol, {})}
    config = chosen.get("config_kwargs", {})
    config = json.loads(config) if isinstance(config, str) else config
    return {
        "use_listings_cache": False,
        **chosen,
        "config_kwargs": {**TIMEOUTS, "retries": {"total_max_attempts": 1}, **config},
    }
