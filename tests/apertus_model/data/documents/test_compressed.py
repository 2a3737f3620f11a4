from __future__ import annotations

import bz2
import contextlib
import gzip
import io
import lzma
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest
import zstandard
from fsspec.implementations.local import LocalFileSystem

from apertus_model.data.documents import compressed
from apertus_model.data.documents.compressed import decompressed
from tests.apertus_model.data.documents.remote import RemoteFiles

FORMATS: list[tuple[str, Callable[[bytes], bytes]]] = [
    ("a.gz", gzip.compress),
    ("a.bz2", bz2.compress),
    ("a.xz", lzma.compress),
    ("a.zst", zstandard.ZstdCompressor(write_checksum=True).compress),
]
ERRORS = (EOFError, OSError, zlib.error, lzma.LZMAError)


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
        with pytest.raises(ERRORS):
            decompressed(io.BytesIO((first + second)[:length]), name).read()


@pytest.mark.parametrize(("name", "compress"), FORMATS)
def test_no_flipped_bit_of_any_part_gives_another_content(
    name: str, compress: Callable[[bytes], bytes]
) -> None:
    parts = [compress(b"first " * 20), compress(b"second " * 20), compress(b"third")]
    whole, expected = b"".join(parts), b"first " * 20 + b"second " * 20 + b"third"
    for place in range(8 * len(whole)):
        damaged = bytearray(whole)
        damaged[place // 8] ^= 1 << place % 8
        with contextlib.suppress(*ERRORS):
            assert decompressed(io.BytesIO(damaged), name).read() == expected, place


@pytest.mark.parametrize("zeros", [4, 8, 2**18, 2**18 + 4])
def test_padding_of_xz_is_skipped(zeros: int) -> None:
    first, second, padding = lzma.compress(b"first "), lzma.compress(b"second"), bytes(zeros)
    for content in (first + padding + second, first + second + padding, first + padding + second + padding):
        assert decompressed(io.BytesIO(content), "a.xz").read() == b"first second"
    for content in (first + bytes(3) + second, first + second + bytes(zeros + 1)):
        with pytest.raises(OSError, match="zeros follow a compressed part; padding has a multiple of four"):
            decompressed(io.BytesIO(content), "a.xz").read()


@pytest.mark.parametrize(("name", "compress"), FORMATS)
def test_other_bytes_after_the_last_part_are_an_error(name: str, compress: Callable[[bytes], bytes]) -> None:
    for rest in (b"x", b"more text\n" * 20, b"\xff\0\0\0"):
        with pytest.raises(ERRORS):
            decompressed(io.BytesIO(compress(b"first") + rest), name).read()


@pytest.mark.parametrize(("name", "compress"), FORMATS)
def test_content_is_recognised_by_its_first_bytes_under_any_name(
    name: str, compress: Callable[[bytes], bytes]
) -> None:
    for path in ("a.jsonl", "a", "folder.gz/a.txt", *(other for other, _ in FORMATS)):
        assert decompressed(io.BytesIO(compress(b"content")), path).read() == b"content"
    with pytest.raises(ERRORS):
        decompressed(io.BytesIO(b"plain text, not compressed"), name).read()


def test_a_file_of_xz_that_needs_much_memory_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    content = lzma.compress(b"text", preset=9)  # 64 MiB
    assert decompressed(io.BytesIO(content), "a.xz").read() == b"text"
    monkeypatch.setattr(compressed, "XZ_BYTES", 2**26)
    with pytest.raises(lzma.LZMAError, match="limit"):
        decompressed(io.BytesIO(content), "a.xz").read()


def test_file_with_another_suffix_is_read_uncompressed() -> None:
    for name in ("a.zip", "a.jsonl", "a"):
        for content in (b"content", b"BZh is a text", b""):
            assert decompressed(io.BytesIO(content), name).read() == content


def test_an_uncompressed_file_has_lines_of_bounded_length_and_positions_wherever_it_is(
    tmp_path: Path,
) -> None:
    (tmp_path / "a.txt").write_bytes(b"first line\nsecond\n")
    for fs in (RemoteFiles(), LocalFileSystem()):
        with fs.open(str(tmp_path / "a.txt"), "rb") as raw:
            file = decompressed(raw, "a.txt")
            assert [file.readline(5), file.readline(99), file.readline()] == [
                b"first",
                b" line\n",
                b"second\n",
            ]
            assert file.seek(6) == file.tell() == 6
            assert file.read(4) == b"line"
            del file
            assert not raw.closed
