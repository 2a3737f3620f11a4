"""Compressed files as streams of their content.

Invariant: all of a file is read or an error is raised. A file may have several compressed parts (as parallel
compressors write them); truncation inside a part is an EOFError or OSError, never a shorter file. (fsspec's
reader of zstandard returns only the first part, and accepts a truncated one.)
"""

from __future__ import annotations

import io
from typing import Any, BinaryIO, cast

import pyarrow
from fsspec.compression import compr
from fsspec.utils import infer_compression


class _Unbuffered(io.RawIOBase):
    """A raw stream over any object with `read`, for `io.BufferedReader`."""

    def __init__(self, file: Any) -> None:
        self._file = file

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self._file.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)


def decompressed(raw: BinaryIO, path: str) -> BinaryIO:
    """The content of an open file, decompressed according to the suffix of `path`: .gz, .bz2, .xz, .zst; any
    other file unchanged."""
    if path.endswith(".zst"):
        stream = pyarrow.CompressedInputStream(pyarrow.PythonFile(raw, mode="r"), "zstd")
        return cast(BinaryIO, io.BufferedReader(_Unbuffered(stream), 2**18))
    name = infer_compression(path)
    return cast(BinaryIO, compr[name](raw, mode="rb")) if name in ("gzip", "bz2", "xz") else raw
