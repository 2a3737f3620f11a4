from __future__ import annotations

import bz2
import gzip
import io
import lzma
import zlib
from collections.abc import Callable

import pytest
import zstandard

from apertus_model.data.compressed import decompressed

FORMATS: list[tuple[str, Callable[[bytes], bytes]]] = [
    ("a.gz", gzip.compress),
    ("a.bz2", bz2.compress),
    ("a.xz", lzma.compress),
    ("a.zst", zstandard.ZstdCompressor(write_checksum=True).compress),
]


@pytest.mark.parametrize(("name", "compress"), FORMATS)
def test_a_file_of_several_compressed_parts_is_read_to_its_end(
    name: str, compress: Callable[[bytes], bytes]
) -> None:
    content = b"".join(map(compress, (b"first ", b"", b"second " * 1000, b"third")))
    assert decompressed(io.BytesIO(content), name).read() == b"first " + b"second " * 1000 + b"third"


@pytest.mark.parametrize(("name", "compress"), FORMATS)
def test_file_truncated_inside_a_compressed_part_is_an_error(
    name: str, compress: Callable[[bytes], bytes]
) -> None:
    first, second = compress(b"first " * 20), compress(bytes(range(100)))
    for length in range(len(first) + 1, len(first + second)):
        with pytest.raises((EOFError, OSError, zlib.error, lzma.LZMAError)):
            decompressed(io.BytesIO((first + second)[:length]), name).read()


def test_file_with_another_suffix_is_read_uncompressed() -> None:
    for name in ("a.zip", "a.jsonl", "a"):
        assert decompressed(io.BytesIO(b"content"), name).read() == b"content"
