"""Reads a file that a marker names, whole or in parts.

Invariants:
- Every byte that is given out belongs to a piece whose SHA-256 was compared with the record: on local disk
  once per process, when a piece is first touched; over a network each time.
- A piece that differs is read once more before it is called damaged: a bit may have been flipped on the way.
- Opening reads nothing. The digests of a file in many pieces are loaded with the first part that is read.
- Safe in several threads; picklable.
"""

from __future__ import annotations

import functools
import hashlib
import io
import itertools
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol, TypeVar

from infra.store.records import (
    DIGEST_BYTES,
    FIX,
    WHOLE_BYTES,
    DamagedError,
    FileRecord,
    StoreError,
    sidecar_path,
)
from infra.store.storage.filesystem import Filesystem
from infra.store.storage.retry import StorageError
from specs.errors import some_of

T = TypeVar("T")

OPEN_FILES = 256
FETCH_BYTES = 8 * 2**20
"""The length of one request in long reads. Half a part of an upload: Swift compares the MD5 of every part
that it reads whole, which took a fifth of a download (`benchmarks.checkpoint_io`)."""
FETCHES = 8  # requests at a time


class RangeFile(Protocol):
    """A file that is read in parts. `name` is for messages; `remote`: a read may wait for a network."""

    @property
    def name(self) -> str: ...
    @property
    def size(self) -> int: ...
    @property
    def remote(self) -> bool: ...
    def read(self, start: int, stop: int) -> bytes:
        """Bytes [start, stop), 0 <= start <= stop <= size."""


class CheckedFile:
    """A file of the store. `size`: bytes, as recorded; `remote`: a read may wait for a network."""

    def __init__(self, store: Filesystem, path: str, record: FileRecord) -> None:
        if record.size > WHOLE_BYTES and record.pieces is None:
            rule = f"a writer of more than {WHOLE_BYTES >> 20} MiB states them (docs/data_formats.md)"
            raise StoreError(f"'{path}' has {record.size} bytes and no digests of its pieces: {rule}")
        self.name = path
        self.record = record
        self.size = record.size
        self.piece_bytes = record.piece_bytes or max(self.size, 1)
        self.pieces = -(-self.size // self.piece_bytes)
        self.remote = not store.is_local
        self._store = store
        self._digests: bytes | None = None
        self._loading = threading.Lock()

    def __reduce__(self) -> tuple[Any, ...]:
        return CheckedFile, (self._store, self.name, self.record)

    @property
    def digests(self) -> bytes:
        """SHA-256 of the pieces, 32 bytes each. DamagedError for a sidecar that differs."""
        with self._loading:
            if self._digests is None:
                self._digests = self._load_digests()
        return self._digests

    def _load_digests(self) -> bytes:
        digests = self.record.pieces
        if digests is None:
            digests = [self.record.sha256] if self.size else []
        if isinstance(digests, list):
            return b"".join(bytes.fromhex(piece) for piece in digests)
        sidecar = sidecar_path(self.name)
        data = self._store.read_range(sidecar, 0, self.pieces * DIGEST_BYTES)
        if len(data) != self.pieces * DIGEST_BYTES or hashlib.sha256(data).hexdigest() != digests:
            problem = f"{len(data)} bytes that are not the digests of the {self.pieces} pieces stated"
            raise DamagedError(f"'{sidecar}' is damaged: {problem}")
        return data

    def read(self, start: int, stop: int) -> bytes:
        """Bytes [start, stop), 0 <= start <= stop <= size. DamagedError when they differ."""
        if not self.remote:
            return self._local.read(start, stop)
        first, last = start // self.piece_bytes, -(-stop // self.piece_bytes)
        if last - first <= max(1, FETCH_BYTES // self.piece_bytes):
            data = self.fetch(first, last)
            return data[start - first * self.piece_bytes : stop - first * self.piece_bytes]
        return b"".join(self.blocks(start, stop))

    def fetch(self, first: int, last: int) -> bytes:
        """The pieces [first, last), checked, in one request."""
        data, wrong = self._compared(first, last)
        if wrong:
            raise self.damaged(wrong)
        return data

    def _compared(self, first: int, last: int) -> tuple[bytes, list[int]]:
        """The pieces [first, last), and the numbers of those that differ when they are read once more."""
        self.digests  # noqa: B018  (loaded before, not after the long reads of other threads)
        start, stop = first * self.piece_bytes, min(last * self.piece_bytes, self.size)
        data = self._store.read_range(self.name, start, stop)
        if wrong := self._differing(data, first):
            data = self._store.read_range(self.name, start, stop)
            wrong = self._differing(data, first)
        return data, wrong

    def _differing(self, data: bytes, first: int) -> list[int]:
        view, digests = memoryview(data), self.digests
        parts = (view[start : start + self.piece_bytes] for start in range(0, len(view), self.piece_bytes))
        return [
            number
            for number, part in enumerate(parts, start=first)
            if hashlib.sha256(part).digest() != digests[number * DIGEST_BYTES : (number + 1) * DIGEST_BYTES]
        ]

    def damaged(self, pieces: list[int]) -> DamagedError:
        """The error for pieces, by number, that are not what was written."""
        start, stop = pieces[0] * self.piece_bytes, min((pieces[0] + 1) * self.piece_bytes, self.size)
        which = f"piece {some_of(map(str, pieces), 8)} of {self.pieces} (bytes {start} to {stop})"
        problem = f"{which} differs from the digest that the manifest states"
        return DamagedError(f"'{self.name}' is damaged: {problem}; {FIX}")

    def blocks(self, start: int = 0, stop: int | None = None) -> Iterator[bytes]:
        """Yields checked blocks of [start, stop), up to `FETCH_BYTES` long; `FETCHES` are read ahead."""
        step = max(1, FETCH_BYTES // self.piece_bytes) * self.piece_bytes
        return read_ahead((self, *span) for span in cut(start, self.size if stop is None else stop, step))

    def bytes(self) -> bytes:
        """The whole content, checked; one request for a file of up to `FETCH_BYTES`."""
        if self.remote and self.size <= FETCH_BYTES:
            data = self._store.read_bytes(self.name)
            if len(data) == self.size and not self._differing(data, 0):
                return data
        self.check_size()
        return b"".join(self.blocks())

    def check(self) -> None:
        """Compares the whole file, whatever was compared before. DamagedError names the differing pieces."""
        self.check_size()
        self.digests  # noqa: B018  (damage of the list is reported as such)
        with ThreadPoolExecutor(FETCHES, "check") as pool:
            differing = pool.map(lambda span: self.differing(*span), self.spans())
            if wrong := [piece for pieces in differing for piece in pieces]:
                raise self.damaged(wrong)

    def check_size(self) -> None:
        """Compares the file's size with the record. DamagedError when it differs, or the file is missing."""
        size = self._store.size(self.name)
        if size is None:
            raise DamagedError(f"'{self.name}' is missing from the store {self._store.url}")
        if size != self.size:
            raise DamagedError(
                f"'{self.name}' is damaged: it has {size} bytes, the manifest states {self.size}; {FIX}"
            )

    def spans(self) -> Iterator[tuple[int, int]]:
        """Yields spans [first, last) of pieces, of about `FETCH_BYTES` each, as `differing` takes them."""
        count = max(1, FETCH_BYTES // self.piece_bytes)
        return ((first, min(first + count, self.pieces)) for first in range(0, self.pieces, count))

    def differing(self, first: int, last: int) -> list[int]:
        """The numbers of those pieces in [first, last) that differ or cannot be read."""
        try:
            return self._compared(first, last)[1]
        except DamagedError:
            return list(range(first, last))

    def stream(self) -> io.BufferedReader:
        """The file as a binary file object that can seek."""
        return io.BufferedReader(_Raw(self), FETCH_BYTES // 4 if self.remote else 2**17)

    def download(self, target: Path) -> None:
        """Writes a checked copy to local disk. StorageError when that fails, as on a full disk."""
        try:
            with open(target, "wb") as copy:
                for block in self.blocks():
                    copy.write(block)
        except StorageError:
            raise
        except OSError as error:
            problem = f"cannot keep a copy of '{self.name}' in {target.parent}: {error}"
            raise StorageError(error.errno, problem) from error

    def ensure(self) -> Path:
        """Checks the pieces of a file on local disk that this process has not checked yet; its path."""
        assert not self.remote, "a local store"
        return self._local.ensure()

    @functools.cached_property
    def _local(self) -> LocalPieces:
        self.check_size()
        return LocalPieces(self, self._store.full(self.name))


def cut(start: int, stop: int, step: int) -> list[tuple[int, int]]:
    """[start, stop) cut into consecutive spans that end at multiples of `step`."""
    borders = [start, *range((start // step + 1) * step, stop, step), stop]
    return [(begin, end) for begin, end in itertools.pairwise(borders) if begin < end]


def read_ahead(spans: Iterable[tuple[RangeFile, int, int]]) -> Iterator[bytes]:
    """Yields the content of each span of a file, in turn; `FETCHES` of them are read side by side."""
    todo = list(spans)
    if len(todo) < 2:
        yield from (file.read(begin, end) for file, begin, end in todo)
        return
    reads = (functools.partial(file.read, begin, end) for file, begin, end in todo)
    with ThreadPoolExecutor(FETCHES, "read") as pool:
        try:
            yield from in_order(pool, reads, FETCHES)
        finally:
            pool.shutdown(cancel_futures=True)


def in_order(pool: ThreadPoolExecutor, calls: Iterable[Callable[[], T]], ahead: int) -> Iterator[T]:
    """Yields results in order, while the pool makes the next `ahead`. Submits as results are asked for."""
    pending: deque[Future[T]] = deque()
    for call in calls:
        pending.append(pool.submit(call))
        if len(pending) > ahead:
            yield pending.popleft().result()
    while pending:
        yield pending.popleft().result()


class LocalPieces:
    """A file on local disk whose pieces are checked when they are first touched."""

    def __init__(self, file: CheckedFile, path: str) -> None:
        self._file = file
        self._path = path
        seen = os.stat(path)
        as_opened = (path, seen.st_ino, seen.st_mtime_ns, seen.st_size, file.record.sha256)
        self._sound = _checked_here.setdefault(as_opened, bytearray(file.pieces))

    def read(self, start: int, stop: int) -> bytes:
        width = self._file.piece_bytes
        first, last = start // width, -(-stop // width)
        missing = [piece for piece in range(first, last) if not self._sound[piece]]
        if missing:
            begin, end = missing[0] * width, min((missing[-1] + 1) * width, self._file.size)
            data = self._check(missing[0], missing[-1] + 1)
            if begin <= start and stop <= end:
                return data[start - begin : stop - begin]
        file = descriptor(self._path)  # held while reading: another thread may evict it from the cache
        data = os.pread(file.number, stop - start, start)
        if len(data) < stop - start:
            before = f"it had {self._file.size} bytes when it was opened"
            raise DamagedError(f"'{self._file.name}' ends at byte {start + len(data)}; {before}")
        return data

    def ensure(self) -> Path:
        spans = [(first, last) for first, last in self._file.spans() if not all(self._sound[first:last])]
        with ThreadPoolExecutor(FETCHES, "check") as pool:
            deque(pool.map(lambda span: self._check(*span), spans), maxlen=0)
        return Path(self._path)

    def _check(self, first: int, last: int) -> bytes:
        data = self._file.fetch(first, last)
        self._sound[first:last] = b"\1" * (last - first)
        return data


class _Raw(io.RawIOBase):
    """The raw stream that `io.BufferedReader` reads from."""

    def __init__(self, file: CheckedFile) -> None:
        self._file = file
        self._place = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._place, io.SEEK_END: self._file.size}[whence]
        self._place = max(0, base + offset)
        return self._place

    def readinto(self, buffer: Any) -> int:
        stop = min(self._place + len(buffer), self._file.size)
        data = self._file.read(self._place, stop) if stop > self._place else b""
        buffer[: len(data)] = data
        self._place += len(data)
        return len(data)


class Descriptor:
    """An open file. Closed with the last reference, so never under a thread that reads."""

    def __init__(self, path: str) -> None:
        self.number = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    # bound here: modules may be gone when a process ends
    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        if hasattr(self, "number"):
            close(self.number)


descriptor = functools.lru_cache(maxsize=OPEN_FILES)(Descriptor)

# whether this process has checked each piece of a local file, as the file was when it was opened
_checked_here: dict[tuple[Any, ...], bytearray] = {}
