"""Reads parts of large files: of a local file by position, of a stored file in pieces that a bounded local
cache keeps.

Invariants:
- Opening reads nothing. Memory and disk hold `reader.OPEN_FILES` descriptors, `CACHE_BYTES` of pieces, and 33
  bytes per MiB of the files that are read (`infra.store.records`).
- A part has exactly the bytes that were asked for, or reading it fails. Those of a stored file were compared
  with digests (`infra.store.files.reader`); a local file of no artifact (`LocalFile`) has none.
- Safe in several threads: pieces of a network store are fetched side by side.
"""

from __future__ import annotations

import functools
import logging
import os
import tempfile
import threading
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from infra.store.files.reader import descriptor
from infra.store.records import PIECE_BYTES, StoreError

if TYPE_CHECKING:
    from infra.store.reading.artifact import Artifact

CACHE_BYTES = 4 * 2**30

logger = logging.getLogger(__name__)


class LocalFile:
    """A local file. StoreError when it has become shorter since it was opened."""

    def __init__(self, path: Path | str) -> None:
        self.name = str(path)
        self.size = os.stat(path).st_size
        self.remote = False

    def read(self, start: int, stop: int) -> bytes:
        file = descriptor(self.name)  # held while reading: another thread may evict it from the cache
        data = os.pread(file.number, stop - start, start)
        if len(data) < stop - start:
            before = f"it had {self.size} bytes when it was opened"
            raise StoreError(f"{self.name} ends at byte {start + len(data)}; {before}")
        return data


class BlockCache:
    """A cache of checked pieces of stored files in an unnamed file below `folder` (the system's temporary
    folder) that disappears with the process. The least recently used piece is replaced first; a full disk
    makes the cache smaller. `block_bytes`: the longest piece that is kept."""

    def __init__(
        self,
        folder: Path | str | None = None,
        *,
        block_bytes: int = PIECE_BYTES,
        capacity_bytes: int = CACHE_BYTES,
    ) -> None:
        self.folder = str(folder or tempfile.gettempdir())
        self.block_bytes = block_bytes
        self.capacity_bytes = capacity_bytes
        self.fetched_bytes = 0
        self._slots: OrderedDict[tuple[str, int], int] = OrderedDict()
        self._unused: Iterator[int] = iter(range(capacity_bytes // block_bytes))  # slots
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[Any, ...]:
        sizes: dict[str, Any] = {"block_bytes": self.block_bytes, "capacity_bytes": self.capacity_bytes}
        return functools.partial(BlockCache, **sizes), (self.folder,)

    def __len__(self) -> int:
        """The number of pieces."""
        return len(self._slots)

    @functools.cached_property
    def _file(self) -> Any:
        Path(self.folder).mkdir(parents=True, exist_ok=True)
        return tempfile.TemporaryFile(dir=self.folder, prefix="pieces-")

    def get(self, file: str, piece: int, begin: int, end: int) -> bytes | None:
        """Bytes [begin, end) of a piece, or None if the piece is not kept."""
        with self._lock:
            slot = self._slots.get((file, piece))
            if slot is None:
                return None
            self._slots.move_to_end((file, piece))
            return os.pread(self._file.fileno(), end - begin, slot * self.block_bytes + begin)

    def put(self, file: str, piece: int, data: bytes | memoryview) -> None:
        """Keeps a piece, unless it is longer than `block_bytes`."""
        with self._lock:
            self.fetched_bytes += len(data)
            if (file, piece) in self._slots or len(data) > self.block_bytes:
                return
            slot = next(self._unused, None)
            if slot is None:
                if not self._slots:
                    return
                slot = self._slots.popitem(last=False)[1]
            try:
                written = os.pwrite(self._file.fileno(), data, slot * self.block_bytes)
            except OSError:
                written = 0
            if written == len(data):
                self._slots[file, piece] = slot
            else:
                self._unused = iter(())
                size = len(self._slots) * self.block_bytes >> 20
                logger.warning(
                    "the disk of %s is full: the cache of pieces stays at %d MiB", self.folder, size
                )


class StoredFile:
    """A file of an artifact. DamagedError when the content that is read is not what the manifest states.
    `cache` keeps the pieces of a remote file; without it, a checked copy of the whole file is read."""

    def __init__(self, artifact: Artifact, name: str, cache: BlockCache | None) -> None:
        self._artifact, self._name = artifact, name
        self._file = artifact.open(name)
        self._cache = cache if self._file.remote else None
        self.name = self._file.name
        self.size = self._file.size
        self.remote = self._cache is not None

    def read(self, start: int, stop: int) -> bytes:
        if self._cache is not None:
            return self._read_pieces(self._cache, start, stop)
        return self._copy.read(start, stop) if self._file.remote else self._file.read(start, stop)

    def _read_pieces(self, cache: BlockCache, start: int, stop: int) -> bytes:
        width = self._file.piece_bytes
        within = {
            piece: (max(start - piece * width, 0), min(stop - piece * width, width))
            for piece in range(start // width, -(-stop // width))
        }
        pieces = {piece: cache.get(self.name, piece, *span) for piece, span in within.items()}
        missing = [piece for piece, data in pieces.items() if data is None]
        if missing:
            data = memoryview(self._file.fetch(missing[0], missing[-1] + 1))
            for piece in range(missing[0], missing[-1] + 1):
                begin, end = within[piece]
                content = data[(piece - missing[0]) * width : (piece - missing[0] + 1) * width]
                pieces[piece] = bytes(content[begin:end])
                cache.put(self.name, piece, content)
        return b"".join(data or b"" for data in pieces.values())

    @functools.cached_property
    def _copy(self) -> LocalFile:
        return LocalFile(self._artifact.local(self._name))
