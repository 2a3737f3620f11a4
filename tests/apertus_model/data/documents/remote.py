"""Files of a remote file system, without a network."""

from __future__ import annotations

from typing import Any

from fsspec.implementations.local import LocalFileSystem
from fsspec.spec import AbstractBufferedFile


class RemoteFile(AbstractBufferedFile):  # type: ignore[misc]
    """A file like those of S3, GCS and HTTP, whose `readline` takes no size."""

    def _fetch_range(self, start: int, end: int) -> bytes:
        return self.fs.cat_file(self.path, start, end)  # type: ignore[no-any-return]


class RemoteFiles(LocalFileSystem):  # type: ignore[misc]
    """The local files, opened as remote ones."""

    def _open(self, path: str, mode: str = "rb", **options: Any) -> RemoteFile:
        return RemoteFile(LocalFileSystem(), path, mode)
