"""Writes one file of the store, of any length, and computes its digests on the way.

Invariants: the file is in the store, whole, when the block of the writer ended without an exception, and in
no other case: it is written under another name (local disk), as the parts of an upload that is completed last
(S3), or in one call. Nothing is read back: SHA-256 of the whole and of its pieces are computed in two threads
beside the transfer. At most `PARTS_AHEAD + 2` parts are held in memory. Once closed, the size that the store
states is compared with what was written.
"""

from __future__ import annotations

import hashlib
import io
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType

from infra.store.files.sinks import PART_BYTES, sink_for, write_whole
from infra.store.records import FileRecord, make_record, piece_digests, sidecar_path
from infra.store.storage.filesystem import Filesystem
from infra.store.storage.retry import WrongLength


class Writer:
    """A binary file that is being written. `record`: what a marker states about it, set by `close`;
    `piece_bytes`: the length of the pieces whose digests are stated."""

    def __init__(self, store: Filesystem, path: str, piece_bytes: int) -> None:
        self.path = path
        self.name = store.full(path)
        self.closed = False
        self._store = store
        self._piece_bytes = piece_bytes
        self._size = 0
        self._part = bytearray()  # the beginning of the next part
        self._digests = Digests(piece_bytes)
        self._sink = sink_for(store, path)
        self._record: FileRecord | None = None
        self._placed = False

    @property
    def record(self) -> FileRecord:
        assert self._record is not None, f"{self.path} is not written yet"
        return self._record

    def __enter__(self) -> Writer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            self.abort()

    def write(self, data: bytes | bytearray | memoryview) -> int:
        """Takes all of `data`, which may change afterwards. StorageError, and the file is given up."""
        if self.closed:
            raise ValueError(f"{self.path} is closed")
        view = memoryview(data).cast("B")
        start = 0
        while start < len(view):
            length = self._sink.next_length()
            fitting = view[start : start + length - len(self._part)]
            start += len(fitting)
            self._size += len(fitting)
            self._part += fitting
            if len(self._part) == length:
                part, self._part = self._part, bytearray()
                self._give(part)
        return len(view)

    def _give(self, part: bytearray) -> None:
        try:
            self._digests.update(part)
            with self._store.timed():
                self._sink.put(part)
        except BaseException:
            self.abort()
            raise

    def tell(self) -> int:
        """Bytes written so far."""
        return self._size

    def writable(self) -> bool:
        return True

    def flush(self) -> None:
        """Does nothing: no data are visible before `close`."""

    def fileno(self) -> int:
        raise io.UnsupportedOperation("a file of the store has no descriptor while it is written")

    def close(self) -> None:
        """Completes the file. Does nothing when the file is closed already."""
        if self.closed:
            return
        try:
            last = bytes(self._part)
            self._digests.update(last)
            with self._store.timed():
                self._sink.finish(last)
            self._placed = True
            self._check_size()
            sha256, pieces = self._digests.result()
            record, sidecar = make_record(self._size, sha256, pieces, self._piece_bytes)
            self.closed = True
            if sidecar is not None:
                write_whole(self._store, sidecar_path(self.path), sidecar)
            self._record = record
        except BaseException:
            self.abort()
            raise

    def _check_size(self) -> None:
        def ask() -> None:
            size = self._store.size(self.path)
            if size != self._size:
                stored = f"the store {self._store.url} has {size or 0} bytes of '{self.path}'"
                raise WrongLength(f"{stored}, {self._size} were written")

        self._store.call(f"closing '{self.path}'", ask, size=None)

    def abort(self) -> None:
        """Gives the file up: nothing of it stays visible. An upload that cannot be taken back now, since the
        storage is gone, is left to the storage's own rule for incomplete uploads."""
        self.closed = True
        self._part = bytearray()
        self._digests.stop()
        self._sink.abort()
        if self._placed:
            try:
                self._store.remove(self.path)
            except OSError:  # the error that led here is raised already; no marker names the file
                return


class Digests:
    """SHA-256 of a stream and of its pieces; each in a thread of its own, from the second part on."""

    def __init__(self, piece_bytes: int) -> None:
        self._piece_bytes = piece_bytes
        self._whole = hashlib.sha256()
        self._pieces: list[list[bytes]] = []
        self._pools: tuple[ThreadPoolExecutor, ThreadPoolExecutor] | None = None
        self._pending: deque[tuple[Future[None], Future[list[bytes]]]] = deque()

    def update(self, part: bytes | bytearray) -> None:
        """Adds a part, which has whole pieces unless it is the last one."""
        if self._pools is None and len(part) < PART_BYTES:
            self._whole.update(part)
            self._pieces.append(piece_digests(memoryview(part), self._piece_bytes))
            return
        if self._pools is None:
            self._pools = ThreadPoolExecutor(1, "sha256"), ThreadPoolExecutor(1, "sha256 of pieces")
        whole = self._pools[0].submit(self._whole.update, part)
        pieces = self._pools[1].submit(piece_digests, memoryview(part), self._piece_bytes)
        self._pending.append((whole, pieces))
        while len(self._pending) > 2:
            self._collect()

    def _collect(self) -> None:
        whole, pieces = self._pending.popleft()
        whole.result()
        self._pieces.append(pieces.result())

    def result(self) -> tuple[str, list[bytes]]:
        """The digest of the whole, hexadecimal, and those of the pieces, 32 bytes each."""
        while self._pending:
            self._collect()
        self.stop()
        return self._whole.hexdigest(), [digest for part in self._pieces for digest in part]

    def stop(self) -> None:
        for pool in self._pools or ():
            pool.shutdown(wait=False, cancel_futures=True)
