"""Compressed files as streams of their content.

Invariant: all of a file is read or an error is raised. A file may have several compressed parts (as parallel
compressors write them), with zeros between and after them where the format has such padding; truncation
inside a part, a damaged part and other bytes are an EOFError, an OSError or an LZMAError, never a shorter
file. (fsspec's reader of zstandard returns only the first part, and accepts a truncated one; Python's readers
of bz2 and xz take whatever does not begin a part for the end.)
"""

import bz2
import gzip
import io
import lzma
import re
from pathlib import PurePosixPath
from typing import Any, BinaryIO, cast

import pyarrow

READ_BYTES = 2**18
XZ_BYTES = 2**28
"""The memory of a decoder of xz; its highest level needs a quarter."""
SUFFIXES = {".gz": "gzip", ".bz2": "bz2", ".xz": "xz", ".zst": "zstd"}
_BEGINNINGS = {
    "gzip": re.compile(rb"\x1f\x8b\x08"),
    "bz2": re.compile(rb"BZh[1-9](1AY&SY|\x17rE8P\x90)"),
    "xz": re.compile(rb"\xfd7zXZ\0"),
    "zstd": re.compile(rb"\x28\xb5\x2f\xfd"),
}


class _Unbuffered(io.RawIOBase):
    """A raw stream over any object with `read`, for `io.BufferedReader`. It does not close the object."""

    def __init__(self, file: Any) -> None:
        self._file = file

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return bool(self._file.seekable())

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        return int(self._file.seek(offset, whence))

    def readinto(self, buffer: Any) -> int:
        data = self._file.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)


class _Parts(io.IOBase):
    """The content of the parts of a .bz2 or .xz file."""

    def __init__(self, file: BinaryIO, name: str) -> None:
        self._file, self._name = file, name
        self._held = b""  # read and not yet given to the decoder
        self._decoder = self._new()

    def _new(self) -> Any:
        if self._name == "bz2":
            return bz2.BZ2Decompressor()
        return lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=XZ_BYTES)

    def read(self, size: int) -> bytes:
        """Up to `size` bytes; none at the end of the last part."""
        content = b""
        while self._decoder is not None and not content:
            if self._decoder.eof:
                self._next_part()
                continue
            data = b""
            if self._decoder.needs_input and not (data := self._held or self._file.read(READ_BYTES)):
                raise EOFError("the file ends inside a compressed part")
            self._held = b""
            content = self._decoder.decompress(data, size)
        return content

    def _next_part(self) -> None:
        """Skips the padding of xz, zeros in fours; without another part, there is no decoder any more."""
        self._held, zeros = self._decoder.unused_data or self._file.read(READ_BYTES), 0
        while self._name == "xz" and self._held.startswith(b"\0"):
            rest = self._held.lstrip(b"\0")
            zeros += len(self._held) - len(rest)
            self._held = rest or self._file.read(READ_BYTES)
        if zeros % 4:
            raise OSError(f"{zeros} zeros follow a compressed part; padding has a multiple of four")
        self._decoder = self._new() if self._held else None


def decompressed(raw: BinaryIO, path: str) -> BinaryIO:
    """The content of an open file, decompressed if its first bytes or the suffix of `path` are those of
    .gz, .bz2, .xz or .zst. It reads lines up to a size, which files of fsspec do not; without compression, it
    can also seek."""
    beginning = raw.read(16)
    raw.seek(0)
    names = (name for name, pattern in _BEGINNINGS.items() if pattern.match(beginning))
    name = next(names, SUFFIXES.get(PurePosixPath(path).suffix.lower()))
    if name == "gzip":
        return cast(BinaryIO, gzip.GzipFile(fileobj=raw))
    stream: Any = raw if name is None else _Parts(raw, name)
    if name == "zstd":
        stream = pyarrow.CompressedInputStream(pyarrow.PythonFile(raw, mode="r"), name)
    return cast(BinaryIO, io.BufferedReader(_Unbuffered(stream), READ_BYTES))
