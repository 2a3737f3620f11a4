"""Reading parts of large files: a local one by position, a stored one in blocks that a bounded local cache keeps.

Invariants:
- Opening reads nothing. What is held in memory and on disk does not grow with the files: `OPEN_FILES` descriptors, `CACHE_BYTES` of blocks.
- A part has exactly the bytes that were asked for, or reading it fails. What stands behind them depends on how a file is read:
  a whole file (local, or copied to the cache of `Artifact.local`) is checked as that method says, by its SHA-256 or its size; a stored
  file that is read in blocks by its size alone, since the store's digests are those of whole files.
- Safe in several threads: blocks of a network store are fetched side by side.
"""

from __future__ import annotations

import functools
import logging
import os
import tempfile
import threading
from collections import OrderedDict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from infra.store.store import StoreError

if TYPE_CHECKING:
    from infra.store.artifact import Artifact

OPEN_FILES = 256
BLOCK_BYTES = 128 * 2**10  # eight windows of 4,096 tokens: little to read in vain, few requests for long ones
CACHE_BYTES = 4 * 2**30

logger = logging.getLogger(__name__)


class RangeFile(Protocol):
    """A file that is read in parts. `name` is for messages, `size` in bytes; `remote` when a read may wait for a network."""

    @property
    def name(self) -> str: ...
    @property
    def size(self) -> int: ...
    @property
    def remote(self) -> bool: ...
    def read(self, start: int, stop: int) -> bytes:
        """Bytes [start, stop), 0 <= start <= stop <= size."""


class LocalFile:
    """A local file. Raises FileNotFoundError when there is none; StoreError when it has become shorter since."""

    def __init__(self, path: Path | str) -> None:
        self.name = str(path)
        self.size = os.stat(path).st_size
        self.remote = False

    def read(self, start: int, stop: int) -> bytes:
        file = _descriptor(self.name)  # held while reading: another thread may put it out of the cache
        data = os.pread(file.number, stop - start, start)
        if len(data) < stop - start:
            raise StoreError(f"{self.name} ends at byte {start + len(data)}; it had {self.size} bytes when it was opened")
        return data


class _Descriptor:
    """An open file. Closed with the last reference, so never under a thread that reads."""

    def __init__(self, path: str) -> None:
        self.number = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def __del__(self) -> None:
        if hasattr(self, "number"):
            os.close(self.number)


_descriptor = functools.lru_cache(maxsize=OPEN_FILES)(_Descriptor)


class BlockCache:
    """Blocks of stored files in one unnamed file below `folder`, the least recently used replaced first. It goes with the process, however
    that ends. A full disk makes it smaller, and is logged. Without a folder it lies in the system's temporary one."""

    def __init__(self, folder: Path | str | None = None, *, block_bytes: int = BLOCK_BYTES, capacity_bytes: int = CACHE_BYTES) -> None:
        self.folder = str(folder or tempfile.gettempdir())
        self.block_bytes = block_bytes
        self.capacity_bytes = capacity_bytes
        self.fetched_bytes = 0
        self._slots: OrderedDict[tuple[str, int], int] = OrderedDict()
        self._limit = capacity_bytes // block_bytes
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[Any, ...]:
        return functools.partial(BlockCache, block_bytes=self.block_bytes, capacity_bytes=self.capacity_bytes), (self.folder,)

    def __len__(self) -> int:
        """Number of blocks."""
        return len(self._slots)

    @functools.cached_property
    def _file(self) -> Any:
        Path(self.folder).mkdir(parents=True, exist_ok=True)
        return tempfile.TemporaryFile(dir=self.folder, prefix="blocks-")

    def get(self, file: str, block: int) -> bytes | None:
        """`block_bytes` bytes, of which the last block of a file uses the first ones."""
        with self._lock:
            slot = self._slots.get((file, block))
            if slot is None:
                return None
            self._slots.move_to_end((file, block))
            return os.pread(self._file.fileno(), self.block_bytes, slot * self.block_bytes)

    def put(self, file: str, block: int, data: bytes) -> None:
        """Keeps a block, at most `block_bytes` long."""
        with self._lock:
            self.fetched_bytes += len(data)
            if (file, block) in self._slots or not self._limit:
                return
            slot = len(self._slots) if len(self._slots) < self._limit else self._slots.popitem(last=False)[1]
            try:
                written = os.pwrite(self._file.fileno(), data, slot * self.block_bytes)
            except OSError:
                written = 0
            if written == len(data):
                self._slots[file, block] = slot
            elif slot == len(self._slots):
                self._limit = slot
                logger.warning("the disk of %s is full: the cache of blocks stays at %d MiB", self.folder, slot * self.block_bytes >> 20)
            else:
                raise StoreError(f"the cache of blocks in {self.folder} cannot be written")


class StoredFile:
    """A file of an artifact. StoreError when it is not what the manifest states.

    Args:
        cache: of its blocks, for a store elsewhere; None reads a whole local file, the stored one or a checked copy (`Artifact.local`).
    """

    def __init__(self, artifact: Artifact, name: str, cache: BlockCache | None) -> None:
        self._store = artifact.store
        self._path = artifact.stored_name(name)
        self._artifact, self._file = artifact, name
        self._cache = None if artifact.store.is_local else cache
        self.name = self._path
        self.remote = self._cache is not None
        self.size = int(artifact.manifest["files"][name]["size"])

    def read(self, start: int, stop: int) -> bytes:
        if self._cache is None:
            return self._local.read(start, stop)
        self._check_size  # noqa: B018  (once)
        size = self._cache.block_bytes
        first, last = start // size, -(-stop // size)
        blocks = {block: self._cache.get(self._path, block) for block in range(first, last)}
        missing = [block for block, data in blocks.items() if data is None]
        if missing:
            begin, end = missing[0] * size, min((missing[-1] + 1) * size, self.size)
            data = self._fetch(begin, end)
            for block in range(missing[0], missing[-1] + 1):
                blocks[block] = piece = data[(block - missing[0]) * size : (block - missing[0] + 1) * size]
                self._cache.put(self._path, block, piece)
        return b"".join(data or b"" for data in blocks.values())[start - first * size : stop - first * size]

    def _fetch(self, start: int, stop: int) -> bytes:
        try:
            data: bytes = self._store.fs.cat_file(self._store.full(self._path), start=start, end=stop)
        except FileNotFoundError as error:
            raise StoreError(f"'{self._path}' is not in the store {self._store.url}") from error
        if len(data) != stop - start:
            raise StoreError(f"the store {self._store.url} gave {len(data)} bytes of '{self._path}' for {start} to {stop}")
        return data

    @functools.cached_property
    def _local(self) -> LocalFile:
        return LocalFile(self._artifact.local(self._file))

    @functools.cached_property
    def _check_size(self) -> None:
        try:
            size = int(self._store.fs.info(self._store.full(self._path))["size"])
        except FileNotFoundError as error:
            raise StoreError(f"'{self._path}' is not in the store {self._store.url}") from error
        if size != self.size:
            raise StoreError(
                f"'{self._path}' is damaged: it has {size} bytes, the manifest states {self.size}; remove its artifact folder to have it "
                "made again"
            )
