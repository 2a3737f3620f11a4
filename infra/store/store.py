"""Files of the store: atomic, write-once, and never outside the root.

Layout, below the store's URL:

    format.json                                the version of this layout
    inputs/<key>.json                          digests of documents outside the store, by listing (`infra.store.inputs`)
    runs/<pipeline>/<time>-<id>.json           which artifacts a run of a spec referred to
    <kind>/<fingerprint>/identity.json         what was hashed, written when the first attempt begins
    <kind>/<fingerprint>/manifest.json         written last: the artifact is complete (training: manifest-<step>.json)
    <kind>/<fingerprint>/checkpoints/<step>.json   written last: that checkpoint is complete
    <kind>/<fingerprint>/references/<step>-<id>.json   another artifact starts from that checkpoint (`infra.store.retention`)
    <kind>/<fingerprint>/units/<key>.json      written last: that unit of work is complete
    <kind>/<fingerprint>/attempts/<id>/...     the files; an attempt never touches another one's

Invariants: what no marker names is never read. A marker names every file with size and SHA-256. A committed file is never rewritten;
a marker appears whole or not at all, and the first writer wins.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any

import fsspec
from fsspec.implementations.local import LocalFileSystem

from specs.sources import without_credentials

FORMAT = 1
CHUNK = 4 * 2**20


class StoreError(RuntimeError):
    """The store holds something else than it should, or refuses an operation. The message says what and what to do."""


class Store:
    """A folder on an fsspec filesystem. Paths are relative to it, with `/`. `seconds` sums the time spent in storage calls."""

    def __init__(self, fs: fsspec.AbstractFileSystem, root: str) -> None:
        self.fs = fs
        self.root = root.rstrip("/")
        self.seconds = 0.0

    @classmethod
    def open(cls, url: str) -> Store:
        """Connects, and checks the version of the layout. StoreError for a folder of another version."""
        try:
            without_credentials(url)
        except ValueError as error:
            raise StoreError(f"the store has {error}") from None
        try:
            fs, root = fsspec.core.url_to_fs(url)
        except (ValueError, ImportError, OSError) as error:
            raise StoreError(f"cannot open the store '{url}': {error}") from error
        if isinstance(fs, LocalFileSystem):
            root = str(Path(root).expanduser().resolve())
        store = cls(fs, root)
        document = store.read_json("format.json") if store.exists("format.json") else None
        if document is not None and document.get("format") != FORMAT:
            raise StoreError(f"the store '{url}' has format {document.get('format')}, this program reads format {FORMAT}; use a new store")
        return store

    def initialise(self) -> None:
        """Writes the version marker of a new store."""
        if not self.exists("format.json"):
            self.write_once("format.json", to_json({"format": FORMAT}))

    @property
    def is_local(self) -> bool:
        return isinstance(self.fs, LocalFileSystem)

    @property
    def url(self) -> str:
        """The store's own URL, absolute."""
        return self.root if self.is_local else str(self.fs.unstrip_protocol(self.root))

    def full(self, path: str) -> str:
        """Path on the filesystem. StoreError for a path that would leave the store."""
        parts = PurePosixPath(path).parts
        if not parts or path.startswith("/") or ".." in parts or "\\" in path or "\0" in path:
            raise StoreError(f"'{path}' is not a path inside the store")
        full = f"{self.root}/{path}"
        if self.is_local and not Path(full).resolve().is_relative_to(Path(self.root).resolve()):
            raise StoreError(f"'{path}' leads out of the store through a link")
        return full

    def location(self, path: str) -> str:
        """What other libraries open: a local path, or a URL with its protocol."""
        full = self.full(path)
        return full if self.is_local else str(self.fs.unstrip_protocol(full))

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Counts the time inside as storage time."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            self.seconds += time.perf_counter() - begin

    def exists(self, path: str) -> bool:
        with self.timed():
            return bool(self.fs.exists(self.full(path)))

    def names(self, path: str) -> list[str]:
        """Sorted names in a folder; empty when there is none."""
        with self.timed():
            try:
                entries = self.fs.ls(self.full(path), detail=False, refresh=True)
            except FileNotFoundError:
                return []
        return sorted(name for entry in entries if not (name := entry.rstrip("/").rsplit("/", 1)[-1]).startswith(".tmp-"))

    def read_bytes(self, path: str) -> bytes:
        with self.timed():
            try:
                data: bytes = self.fs.cat_file(self.full(path))
            except FileNotFoundError as error:
                raise StoreError(f"'{path}' is not in the store {self.url}") from error
        return data

    def read_json(self, path: str) -> Any:
        try:
            return json.loads(self.read_bytes(path))
        except ValueError as error:
            raise StoreError(f"'{path}' in the store {self.url} is damaged: {error}; delete it to have it made again") from error

    def write_once(self, path: str, data: bytes) -> bool:
        """Writes a small file whole or not at all. False when it was there already, which then stays as it is."""
        full = self.full(path)
        with self.timed():
            if self.is_local:
                return _link_once(Path(full), data)
            if self.fs.exists(full):
                return False
            try:
                self.fs.pipe_file(full, data, mode="create")
            except FileExistsError:
                return False
            except NotImplementedError:  # a filesystem without conditional writes; attempts still never share a path
                self.fs.pipe_file(full, data)
            except OSError:
                if not self.fs.exists(full):
                    raise
                return False
        return True

    def upload(self, local: Path, path: str) -> dict[str, Any]:
        """Copies a local file into the store; its `{"size", "sha256"}`, computed while copying."""
        with open(local, "rb") as source:
            return self.write_stream(path, lambda: source.read(CHUNK))

    def write_stream(self, path: str, read: Callable[[], bytes]) -> dict[str, Any]:
        """Writes what `read` returns until it is empty; size and SHA-256 of it."""
        full, digest, size = self.full(path), hashlib.sha256(), 0
        with self.timed():
            if self.is_local:
                Path(full).parent.mkdir(parents=True, exist_ok=True)
            with self.fs.open(full, "wb") as target:
                while chunk := read():
                    digest.update(chunk)
                    size += len(chunk)
                    target.write(chunk)
                if self.is_local:
                    target.flush()
                    os.fsync(target.fileno())
        return {"size": size, "sha256": digest.hexdigest()}

    def writer(self, path: str) -> Writer:
        """A file to write to, in a `with` statement; its `record` is there when it is closed."""
        return Writer(self, path)

    def digest(self, path: str) -> dict[str, Any]:
        """Size and SHA-256 of a stored file, read in chunks."""
        digest, size = hashlib.sha256(), 0
        with self.timed(), self.fs.open(self.full(path), "rb") as source:
            while chunk := source.read(CHUNK):
                digest.update(chunk)
                size += len(chunk)
        return {"size": size, "sha256": digest.hexdigest()}

    def remove(self, path: str) -> None:
        """Removes a file or a folder; nothing happens when it is not there."""
        with self.timed():
            try:
                self.fs.rm(self.full(path), recursive=True)
            except FileNotFoundError:
                pass


class Writer(io.RawIOBase):
    """A stored file that is being written; `record` (`{"size", "sha256"}`) is there when it is closed. Left by an error, it has none."""

    def __init__(self, store: Store, path: str) -> None:
        self._store = store
        self._full = store.full(path)
        if store.is_local:
            Path(self._full).parent.mkdir(parents=True, exist_ok=True)
        self._target = store.fs.open(self._full, "wb")
        self._digest, self._size = hashlib.sha256(), 0
        self.record: dict[str, Any] = {}

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        with self._store.timed():
            self._digest.update(view)
            self._target.write(view)
        self._size += len(view)
        return len(view)

    def tell(self) -> int:
        return self._size

    def close(self) -> None:
        if self.closed:
            return
        with self._store.timed():
            if self._store.is_local:
                self._target.flush()
                os.fsync(self._target.fileno())
            self._target.close()
        self.record = {"size": self._size, "sha256": self._digest.hexdigest()}
        super().close()


def to_json(document: Any) -> bytes:
    return (json.dumps(document, indent=1, sort_keys=True, allow_nan=False) + "\n").encode()


def _link_once(path: Path, data: bytes) -> bool:
    """Local write-once: a hard link of a synced temporary file appears atomically, and fails where the name exists."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.parent / f".tmp-{uuid.uuid4().hex}"
    try:
        with open(temporary, "wb") as target:
            target.write(data)
            target.flush()
            os.fsync(target.fileno())
        try:
            os.link(temporary, path)
        except FileExistsError:
            return False
    finally:
        temporary.unlink(missing_ok=True)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
    return True
