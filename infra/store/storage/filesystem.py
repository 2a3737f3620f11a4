"""Makes the calls of the filesystem that a store is on: tried again, timed, never outside the root, and
write-once.

Invariants: a file appears whole or not at all, and the first writer of a file wins (`write_once`). No answer
comes from a cache of listings. A read has exactly the bytes that were asked for.

Everything goes through `Filesystem.call` (it tries again, limits the time of a try and counts the seconds),
in a few ways:

    here            `info` (exists, size), `ls` (names), `cat_file` (read_bytes, read_range), `pipe_file`
                    (write_once), `rm` (remove)
    files/sinks.py  `pipe_file` for a file of up to one part; `call_s3` for the parts of a longer one on S3,
                    `put_file` elsewhere; `info`
    reading/walk.py `ls` of every folder, or `find` where the storage lists a tree by itself
    local disk      the same through `os`: temporary file, fsync, hard link or rename, fsync of the folder

A small file costs one PUT and one HEAD, a longer one a request per part and three more, and as much for its
sidecar if it has one; a marker a GET, a PUT and a GET. Committing a checkpoint costs a small file and its
marker, whatever is stored already; finding the newest a GET and a listing that retention bounds.
"""

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import accumulate
from pathlib import Path
from typing import TypeVar

import fsspec
from fsspec.implementations.local import LocalFileSystem

from infra.store.records import FIX, DamagedError, StoreError, inside, one_name
from infra.store.storage import local
from infra.store.storage.retry import Retry, WrongLength
from specs.foreign import ForeignError, check_regular

SLOWEST = 2**20  # bytes per second: bounds the time of a large transfer beyond that of a small one

T = TypeVar("T")
_clock_lock = threading.Lock()


class Filesystem:
    """A folder on any fsspec filesystem, for relative paths. `seconds`: with at least one call under way."""

    def __init__(self, fs: fsspec.AbstractFileSystem, root: str, *, retry: Retry | None = None) -> None:
        self.fs = fs
        self.root = root.rstrip("/")
        self.retry = retry or Retry()
        self.seconds = 0.0
        self._calls_under_way = 0
        self._since = 0.0

    @property
    def is_local(self) -> bool:
        return isinstance(self.fs, LocalFileSystem)

    @property
    def url(self) -> str:
        """The store's own URL, absolute."""
        return self.root if self.is_local else str(self.fs.unstrip_protocol(self.root))

    def where(self, path: str) -> str:
        """A file's name in messages."""
        return f"'{path}' in the store {self.url}"

    def full(self, path: str) -> str:
        """The path on the filesystem. StoreError for a path that would leave the store."""
        full = f"{self.root}/{inside(path, 'a call')}"
        if self.is_local and self._leads_out(path):
            raise StoreError(f"'{path}' leads out of the store through a link")
        return full

    def _leads_out(self, path: str) -> bool:
        """Whether a path is outside the store when all links are followed."""
        parts = list(accumulate([self.root, *path.split("/")], os.path.join))
        if not any(map(os.path.islink, parts)):
            return False
        return not Path(parts[-1]).resolve().is_relative_to(Path(self.root).resolve())

    def location(self, path: str) -> str:
        """The path that other libraries open: a local path, or a URL with its protocol."""
        full = self.full(path)
        return full if self.is_local else str(self.fs.unstrip_protocol(full))

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Counts the time inside as storage time, once when several calls overlap."""
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

    def call(self, what: str, function: Callable[[], T], *, size: int | None = 0) -> T:
        """Makes one call of the filesystem, which carries `size` bytes. StorageError if all tries failed or
        the disk is full; FileNotFoundError, PermissionError or FileExistsError as the filesystem says."""
        guard = None if self.is_local or size is None else size / SLOWEST
        with self.timed():
            return self.retry.call(f"{what} in the store {self.url}", function, guard=guard)

    # Looking up

    def size(self, path: str) -> int | None:
        """The size of a file in bytes, or None if it does not exist."""
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
        """The sorted names in a folder (empty: the root), if there is one; no temporary or hidden files."""
        full = self.full(path) if path else self.root

        def ask() -> list[str]:
            self.fs.invalidate_cache(full)
            return [str(entry) for entry in self.fs.ls(full, detail=False)]

        try:
            entries = self.call(f"listing '{path}'", ask)
        except (FileNotFoundError, NotADirectoryError):
            return []
        paths = {entry.rstrip("/") for entry in entries} - {full.rstrip("/")}
        names = {path.rsplit("/", 1)[-1] for path in paths}
        return sorted(name for name in names if name and not name.startswith("."))

    # Reading

    def read_if_there(self, path: str) -> bytes | None:
        """The content of a small file, or None if it does not exist, in one request."""
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
                raise self.damaged(path, error) from error
        data: bytes = self.fs.cat_file(full, **span)
        return data

    def damaged(self, path: str, problem: Exception | str) -> DamagedError:
        """The error for a file that does not hold what it should."""
        return DamagedError(f"{self.where(path)} is damaged: {problem}; {FIX}")

    def missing(self, path: str) -> DamagedError:
        """The error for a file that is not there."""
        return DamagedError(f"'{path}' is not in the store {self.url}")

    def read_bytes(self, path: str) -> bytes:
        """The content of a small file. StoreError if it does not exist."""
        data = self.read_if_there(path)
        if data is None:
            raise self.missing(path)
        return data

    def read_range(self, path: str, start: int, stop: int) -> bytes:
        """Bytes [start, stop) of a file known to have them. DamagedError if it is gone or shorter."""
        full, length = self.full(path), stop - start

        def ask() -> bytes:
            data = self._content(path, full, start=start, end=stop)
            if len(data) != length:
                has = self.size(path)
                if has is not None and has < stop:
                    left = f"the store {self.url} has {has} bytes of it, of which {stop} are needed"
                    raise DamagedError(f"'{path}' is damaged: {left}")
                given = f"the store {self.url} gave {len(data)} bytes of '{path}'"
                raise WrongLength(f"{given} for {start} to {stop}")
            return data

        try:
            return self.call(f"reading '{path}' from {start} to {stop}", ask, size=length) if length else b""
        except FileNotFoundError as error:
            raise self.missing(path) from error

    def read_whole(self, path: str) -> bytes:
        """A file without a stated digest: its length is compared, and a short answer is tried again."""
        size = self.size(path)
        return self.read_bytes(path) if size is None else self.read_range(path, 0, size)

    def check_whole(self, path: str, data: bytes) -> None:
        """Raises WrongLength, so that it is tried again, if the store has another size than it gave."""
        if (has := self.size(path)) != len(data):
            given = f"the store {self.url} gave {len(data)} bytes of '{path}'"
            raise WrongLength(f"{given} and says that it has {has}")

    # Writing

    def write_once(self, path: str, data: bytes) -> bool:
        """Writes a small file whole or not at all. False when it exists already; it then stays as it is.

        The write is exclusive on local disk, and on storage with conditional writes; elsewhere two writers at
        the same moment may both be told True, and the later one's content stays. After a lost answer, the
        stored content is compared with `data`: what matters to one writer only must say whose it is."""
        full = self.full(path)
        if self.is_local:
            return self._link(path, Path(full), data)
        stored = self._stored(path, data)
        if stored is not None and not _is_torn(stored, data):
            return False
        if stored is None:
            self._create(path, full, data)
            stored = self._stored(path, data)
        # torn by a storage whose writes are not atomic: nobody else writes a part of our bytes
        if stored is None or _is_torn(stored, data):
            self.call(f"writing '{path}'", lambda: self._pipe(full, data, "overwrite"))
            stored = self._stored(path, data)
        return stored == data

    def _stored(self, path: str, data: bytes) -> bytes | None:
        """The whole content of the file that is to hold `data`; None if it does not exist."""

        def ask() -> bytes | None:
            stored = self.read_if_there(path)
            if stored is not None and stored != data:
                self.check_whole(path, stored)
            return stored

        return self.call(f"reading '{path}'", ask, size=None)

    def _link(self, path: str, full: Path, data: bytes) -> bool:
        tries = 0

        def link() -> bool:
            nonlocal tries
            tries += 1
            return local.write_once(full, data) or (tries > 1 and full.read_bytes() == data)

        return self.call(f"writing '{path}'", link)

    def _create(self, path: str, full: str, data: bytes) -> None:
        """Writes conditionally, if the filesystem can. Conflicts are no error: what is stored counts."""

        def create() -> None:
            try:
                self._pipe(full, data, "create")
            except FileExistsError:
                return
            except NotImplementedError:
                self._pipe(full, data, "overwrite")
            # a lost answer, or a server whose conflict is an error of another name: what is stored decides
            except OSError:
                if not self.exists(path):
                    raise

        self.call(f"writing '{path}'", create, size=len(data))

    def _pipe(self, full: str, data: bytes, mode: str) -> None:
        self.in_folder(full, lambda: self.fs.pipe_file(full, data, mode=mode))

    def in_folder(self, full: str, write: Callable[[], object]) -> None:
        """Calls `write`, which writes the file `full`; creates the folder if that is needed."""
        try:
            write()
        except FileNotFoundError:
            if hasattr(self.fs, "call_s3"):  # object storage has no folders: the bucket is missing
                raise
            self.fs.makedirs(full.rsplit("/", 1)[0], exist_ok=True)
            write()

    def replace(self, path: str, data: bytes) -> None:
        """Puts a small file in the place of another one, at once; never another content of a marker."""
        full = self.full(path)
        if self.is_local:
            self.call(f"writing '{path}'", lambda: local.replace(Path(full), data))
            return
        self.call(f"writing '{path}'", lambda: self._pipe(full, data, "overwrite"), size=len(data))
        if self._stored(path, data) != data:
            raise StoreError(
                f"'{path}' was written to the store {self.url} and reads back as other bytes; run again"
            )

    def overwrite(self, path: str, data: bytes) -> None:
        """Rewrites a small file, as is done often: in one call, not tried again, not durable on disk."""
        full = self.full(path)
        with self.timed():
            if self.is_local:
                local.replace(Path(full), data, durable=False)
            else:
                self.fs.pipe_file(full, data)

    def move_aside(self, path: str, target: str) -> None:
        """Moves a file on local disk, or whatever is in its place; nothing happens when nothing is there."""
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


def _is_torn(stored: bytes, data: bytes) -> bool:
    return len(stored) < len(data) and data.startswith(stored)
