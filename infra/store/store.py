"""Files of the store: atomic, write-once, checked, and never outside the root.

Layout, below the store's URL:

    format.json                                the version of this layout
    inputs/<key>.json                          digests of documents outside the store, by listing (`infra.store.inputs`)
    inputs/<digest>.files.jsonl                the files behind such a digest, with size and SHA-256 each
    protected/<kind>-<fingerprint>[-<step>].json   a protected stage had finished there
    reports/<pipeline>/<flow run>.html         the report of a deployed run, for people
    runs/<pipeline>/<time>-<id>.json           which artifacts a run of a spec referred to
    <kind>/<fingerprint>/identity.json         what was hashed, written when the first attempt begins
    <kind>/<fingerprint>/manifest.json         written last: the artifact is complete (training: manifest-<step>.json)
    <kind>/<fingerprint>/checkpoints/<step>.json   written last: that checkpoint is complete
    <kind>/<fingerprint>/references/<step>-<id>.json   another artifact starts from that checkpoint (`infra.store.retention`)
    <kind>/<fingerprint>/units/<key>.json      written last: that unit of work is complete
    <kind>/<fingerprint>/attempts/<id>/...     the files; an attempt never touches another one's
    <kind>/<fingerprint>/logs/<id>.txt         what an attempt printed
    <kind>/<fingerprint>/leases/...            who works at it (`infra.store.lease`)
    damaged/<time>/...                         markers that `apertus verify --fix` or `apertus migrate` took away

Invariants: what no marker names is never read. A marker names every file with size and digests (`infra.store.records`), which were
computed while it was written (`infra.store.writer`) and are compared when it is read (`infra.store.reader`). A committed file is never
rewritten; a marker appears whole or not at all, and the first writer wins. No answer comes from a cache of listings.

Calls. Everything goes to the filesystem through `Store.call` (tries again, limits the time of a try, counts the seconds), in few ways:

    here            `info` (exists, size), `ls` (names), `cat_file` (read_bytes, read_range), `pipe_file` (write_once), `rm` (remove)
    sinks.py        `pipe_file` for a file of up to one part; `call_s3` for the parts of a longer one on S3, `put_file` elsewhere; `info`
    contents.py     `ls` of every folder, or `find` where the storage lists a tree by itself
    local disk      the same through `os`: temporary file, fsync, hard link or rename, fsync of the folder

A small file costs one PUT and one HEAD, a longer one a request per part and three more, and as much for its sidecar if it has one; a
marker a GET, a PUT and a GET. Committing a checkpoint costs its rows of metrics (a small file) and its marker, whatever is stored already;
finding the newest one a listing of `checkpoints/`, whose length retention bounds, and a GET.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import fsspec
from fsspec.implementations.local import LocalFileSystem

from infra.store import local
from infra.store.markers import FIX, Format
from infra.store.reader import CheckedFile
from infra.store.records import PIECE_BYTES, DamagedError, StoreError, inside, one_name
from infra.store.retry import Retry, WrongLength
from infra.store.sinks import PART_BYTES
from infra.store.writer import Writer
from specs.foreign import MAX_BYTES, ForeignError, check_length, check_regular, checked, parse_json, shown, trail
from specs.redaction import without_credentials

FORMAT = 2
CHUNK = 4 * 2**20
SLOWEST = 2**20  # bytes per second: what a large transfer may take beyond the time of a small one
TIMEOUTS = {"connect_timeout": 10, "read_timeout": 30}  # of S3, in seconds; trying again is our `Retry`'s

T = TypeVar("T")
_clock_lock = threading.Lock()


class Store:
    """A folder on an fsspec filesystem, whichever. Paths are relative to it, with `/`. `seconds` is the time during which at least one
    storage call was under way. `piece_bytes`: of the files that are written here."""

    def __init__(self, fs: fsspec.AbstractFileSystem, root: str, *, retry: Retry | None = None, piece_bytes: int = PIECE_BYTES) -> None:
        assert PART_BYTES % piece_bytes == 0, "a part is whole pieces"
        self.fs = fs
        self.root = root.rstrip("/")
        self.retry = retry or Retry()
        self.piece_bytes = piece_bytes
        self.seconds = 0.0
        self._calls_under_way = 0
        self._since = 0.0

    @classmethod
    def open(cls, url: str, *, any_format: bool = False) -> Store:
        """Connects, and checks the version of the layout. StoreError for a store of another version, unless `any_format`."""
        try:
            without_credentials(url)
        except ValueError as error:
            raise StoreError(f"the store has {error}") from None
        try:
            fs, root = fsspec.core.url_to_fs(url, **_options(url))
        except (ValueError, ImportError, OSError) as error:
            raise StoreError(f"cannot open the store '{url}': {error}") from error
        if isinstance(fs, LocalFileSystem):
            try:
                root = str(Path(root).expanduser().resolve())
            except (RuntimeError, OSError, ValueError) as error:  # no such user, a loop of links, a NUL
                raise StoreError(f"cannot open the store {shown(url)}: {error}") from error
        if hasattr(fs, "call_s3"):
            fs.retries = 1  # of s3fs; ours are around it, and say so
            if not root:
                raise StoreError(f"cannot open the store '{url}': it names no bucket")
        store = cls(fs, root)
        if not any_format:
            store.check_format(url)
        return store

    def format(self) -> dict[str, Any] | None:
        """The content of `format.json`; None for a new store. DamagedError when it is not what was written."""
        document = self.read_json_if_there("format.json")
        if document is not None:
            try:
                checked(Format, document)
            except ForeignError as error:
                raise self._damaged("format.json", error) from error
        return document

    def check_format(self, name: str) -> None:
        """StoreError for a store of another format than this program's; `name` is its URL for the message."""
        document = self.format()
        if document is None or document == {"format": FORMAT}:
            return
        found = document.get("format")
        if found == FORMAT:
            raise StoreError(f"the migration of the store '{name}' to format {FORMAT} was not finished: run apertus migrate --store {name}")
        if found == 1:
            raise StoreError(f"the store '{name}' has format 1, this program reads format {FORMAT}: run apertus migrate --store {name}")
        raise StoreError(f"the store '{name}' has format {found}, this program reads format {FORMAT}; use a newer program, or a new store")

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
        full = f"{self.root}/{inside(path, 'a call')}"
        if self.is_local and not Path(full).resolve().is_relative_to(Path(self.root).resolve()):
            raise StoreError(f"'{path}' leads out of the store through a link")
        return full

    def location(self, path: str) -> str:
        """What other libraries open: a local path, or a URL with its protocol."""
        full = self.full(path)
        return full if self.is_local else str(self.fs.unstrip_protocol(full))

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Counts the time inside as storage time, once where several calls overlap."""
        with _clock_lock:
            self._calls_under_way += 1
            if self._calls_under_way == 1:
                self._since = time.perf_counter()
        try:
            yield
        finally:
            with _clock_lock:
                self._calls_under_way -= 1
                if not self._calls_under_way:
                    self.seconds += time.perf_counter() - self._since

    def call(self, what: str, function: Callable[[], T], *, size: int = 0) -> T:
        """One call of the filesystem. `size`: bytes that it carries.

        Raises:
            StorageError: it failed until the tries were used up, or the disk is full.
            FileNotFoundError, PermissionError, FileExistsError: as the filesystem says.
        """
        with self.timed():
            return self.retry.call(f"{what} in the store {self.url}", function, guard=None if self.is_local else size / SLOWEST)

    def again(self, what: str, function: Callable[[], T]) -> T:
        """The same for a function that makes calls itself, and finds their answers wrong."""
        with self.timed():
            return self.retry.call(f"{what} in the store {self.url}", function)

    # What there is

    def size(self, path: str) -> int | None:
        """Bytes of a file, or None where there is none."""
        full = self.full(path)

        def ask() -> int:
            self.fs.invalidate_cache(full)
            return int(self.fs.info(full)["size"] or 0)

        try:
            return self.call(f"looking for '{path}'", ask)
        except FileNotFoundError:
            return None

    def exists(self, path: str) -> bool:
        return self.size(path) is not None

    def names(self, path: str) -> list[str]:
        """Sorted names in a folder (empty: the root); none when there is no such folder. Temporary and hidden files are left out."""
        full = self.full(path) if path else self.root

        def ask() -> list[str]:
            self.fs.invalidate_cache(full)
            return [str(entry) for entry in self.fs.ls(full, detail=False)]

        try:
            entries = self.call(f"listing '{path}'", ask)
        except (FileNotFoundError, NotADirectoryError):
            return []
        names = {entry.rstrip("/").rsplit("/", 1)[-1] for entry in entries if entry.rstrip("/") != full.rstrip("/")}
        return sorted(name for name in names if name and not name.startswith("."))

    # Reading

    def read_if_there(self, path: str) -> bytes | None:
        """Content of a small file, or None where there is none: one request."""
        full = self.full(path)
        try:
            return self.call(f"reading '{path}'", lambda: self._content(path, full))
        except FileNotFoundError:
            return None

    def _content(self, path: str, full: str, **span: int) -> bytes:
        if self.is_local:  # a pipe would be waited for, a device never ends
            try:
                check_regular(full)
            except ForeignError as error:
                raise self._damaged(path, error) from error
        data: bytes = self.fs.cat_file(full, **span)
        return data

    def _damaged(self, path: str, error: Exception) -> DamagedError:
        fix = FIX
        if path == "format.json":
            fix = f'replace it by a file that holds {{"format": {FORMAT}}}; if a program of an older format wrote '
            fix += 'this store, by one that holds {"format": 1}, and run apertus migrate'
        return DamagedError(f"'{path}' in the store {self.url} is damaged: {error}; {fix}")

    def read_bytes(self, path: str) -> bytes:
        """Content of a small file. StoreError where there is none."""
        data = self.read_if_there(path)
        if data is None:
            raise DamagedError(f"'{path}' is not in the store {self.url}")
        return data

    def read_range(self, path: str, start: int, stop: int) -> bytes:
        """Bytes [start, stop) of a file that is known to have them. DamagedError when it is gone, or has become shorter."""
        full, length = self.full(path), stop - start

        def ask() -> bytes:
            data = self._content(path, full, start=start, end=stop)
            if len(data) != length:
                has = self.size(path)
                if has is not None and has < stop:
                    raise DamagedError(f"'{path}' is damaged: the store {self.url} has {has} bytes of it, of which {stop} are needed")
                raise WrongLength(f"the store {self.url} gave {len(data)} bytes of '{path}' for {start} to {stop}")
            return data

        try:
            return self.call(f"reading '{path}' from {start} to {stop}", ask, size=length) if length else b""
        except FileNotFoundError as error:
            raise DamagedError(f"'{path}' is not in the store {self.url}") from error

    def read_whole(self, path: str) -> bytes:
        """Content of a file of which no digest is stated: its length is compared, so that an answer that was cut is asked for again."""
        size = self.size(path)
        return self.read_bytes(path) if size is None else self.read_range(path, 0, size)

    def read_json(self, path: str) -> Any:
        """What a marker holds. DamagedError where there is none, or what is there is not JSON."""
        if (found := self.read_document(path)) is None:
            raise DamagedError(f"'{path}' is not in the store {self.url}")
        return found[1]

    def read_json_if_there(self, path: str) -> Any | None:
        """The same, or None where there is none."""
        found = self.read_document(path)
        return None if found is None else found[1]

    def read_document(self, path: str) -> tuple[bytes, Any] | None:
        """The bytes of a marker and what they say, or None where there is none."""
        trail.append(f"'{path}' in the store {self.url}")

        def ask() -> tuple[bytes, Any] | None:
            data = None
            try:
                if self.is_local:
                    check_length(self.size(path) or 0, MAX_BYTES)
                data = self.read_if_there(path)
                return None if data is None else (data, parse_json(data))
            except ForeignError as error:
                if data is not None:
                    self._is_whole(path, data)
                raise self._damaged(path, error) from error

        return self.again(f"reading '{path}'", ask)

    def _is_whole(self, path: str, data: bytes) -> None:
        """WrongLength, which is met with another try, when the store has more or fewer bytes of a file than it gave."""
        if (has := self.size(path)) != len(data):
            raise WrongLength(f"the store {self.url} gave {len(data)} bytes of '{path}' and says that it has {has}")

    def reader(self, path: str, record: dict[str, Any]) -> CheckedFile:
        """A file that a marker names, for reading whole or in parts, checked. Nothing is read yet."""
        return CheckedFile(self, path, record)

    # Writing

    def writer(self, path: str) -> Writer:
        """A context manager with `write(bytes)`; after it closed, `.record` is what the marker has to state. Nothing is left of a file
        whose block an exception left."""
        return Writer(self, path)

    def upload(self, source: Path, path: str) -> dict[str, Any]:
        """Copies a local file into the store; its record."""
        with open(source, "rb") as file, self.writer(path) as target:
            while part := file.read(PART_BYTES):
                target.write(part)
        return target.record

    def write_bytes(self, path: str, data: bytes) -> dict[str, Any]:
        """Writes a file of an attempt; its record."""
        with self.writer(path) as target:
            target.write(data)
        return target.record

    def write_once(self, path: str, data: bytes) -> bool:
        """Writes a small file whole or not at all. False when it was there already, which then stays as it is.

        Exclusive on local disk, and where the storage has conditional writes; elsewhere two writers at the same moment may both be told
        True, and the later one's content stays. Trying again after an answer that was lost is safe: what is there is compared with `data`,
        so a content that matters to one writer only must say whose it is.
        """
        full = self.full(path)
        if self.is_local:
            return self._link(path, Path(full), data)
        found = self._found(path, data)
        if found is not None and not _is_torn(found, data):
            return False
        if found is None:
            self._create(path, full, data)
            found = self._found(path, data)
        if found is None or _is_torn(found, data):  # by a storage whose writes are not atomic: nobody else writes a part of our bytes
            self.call(f"writing '{path}'", lambda: self._pipe(full, data, "overwrite"))
            found = self._found(path, data)
        return found == data

    def _found(self, path: str, data: bytes) -> bytes | None:
        """What is there where `data` is to be, whole."""

        def ask() -> bytes | None:
            found = self.read_if_there(path)
            if found is not None and found != data:
                self._is_whole(path, found)
            return found

        return self.again(f"reading '{path}'", ask)

    def _link(self, path: str, full: Path, data: bytes) -> bool:
        tries = 0

        def link() -> bool:
            nonlocal tries
            tries += 1
            return local.write_once(full, data) or (tries > 1 and full.read_bytes() == data)

        return self.call(f"writing '{path}'", link)

    def _create(self, path: str, full: str, data: bytes) -> None:
        """A conditional write where the filesystem has one. Whatever is there afterwards counts, so a conflict is no error."""

        def create() -> None:
            try:
                self._pipe(full, data, "create")
            except FileExistsError:
                return
            except NotImplementedError:
                self._pipe(full, data, "overwrite")
            except OSError:  # a lost answer, or a server whose conflict is an error of another name: what is there decides
                if not self.exists(path):
                    raise

        self.call(f"writing '{path}'", create, size=len(data))

    def _pipe(self, full: str, data: bytes, mode: str) -> None:
        self.in_folder(full, lambda: self.fs.pipe_file(full, data, mode=mode))

    def in_folder(self, full: str, write: Callable[[], object]) -> None:
        """Calls `write`, which writes the file `full`; where that needs the folder to exist, it is made."""
        try:
            write()
        except FileNotFoundError:
            if hasattr(self.fs, "call_s3"):  # object storage has no folders: the bucket is missing
                raise
            self.fs.makedirs(full.rsplit("/", 1)[0], exist_ok=True)
            write()

    def replace(self, path: str, data: bytes) -> None:
        """Puts a small file in the place of another one, at once. For migrations, and for what is not a commit marker."""
        full = self.full(path)
        if self.is_local:
            self.call(f"writing '{path}'", lambda: local.replace(Path(full), data))
            return
        self.call(f"writing '{path}'", lambda: self._pipe(full, data, "overwrite"), size=len(data))
        if self._found(path, data) != data:
            raise StoreError(f"'{path}' was written to the store {self.url} and reads as something else; try again")

    def move_aside(self, path: str, target: str) -> None:
        """Moves a file, or whatever stands in its place; nothing happens when there is nothing. On local disk."""
        folder, name = Path(self.full(path.rpartition("/")[0])), one_name(path.rpartition("/")[2], "a call")
        if not os.path.lexists(folder / name):
            return
        place = Path(self.full(target))
        place.parent.mkdir(parents=True, exist_ok=True)
        os.rename(folder / name, place)

    def remove(self, path: str) -> None:
        """Removes a file or a folder; nothing happens when it is not there."""
        full = self.full(path)
        try:
            self.call(f"removing '{path}'", lambda: self.fs.rm(full, recursive=True))
        except FileNotFoundError:
            pass


def to_json(document: Any) -> bytes:
    return (json.dumps(document, indent=1, sort_keys=True, allow_nan=False) + "\n").encode()


def _is_torn(found: bytes, data: bytes) -> bool:
    return len(found) < len(data) and data.startswith(found)


def _options(url: str) -> dict[str, Any]:
    """What a filesystem is opened with. What the environment says (`FSSPEC_S3='{"config_kwargs": {...}}'`, `FSSPEC_S3_<OPTION>`) wins."""
    protocol = url.split("://", 1)[0]
    if protocol not in ("s3", "s3a"):
        return {}
    chosen = {**fsspec.config.conf.get("s3", {}), **fsspec.config.conf.get(protocol, {})}
    config = chosen.get("config_kwargs", {})
    config = json.loads(config) if isinstance(config, str) else config
    return {"use_listings_cache": False, **chosen, "config_kwargs": {**TIMEOUTS, "retries": {"total_max_attempts": 1}, **config}}
