"""What is written is what is read, on any storage: digests of files and of their pieces."""

from __future__ import annotations

import hashlib
import pickle
from collections import deque
from pathlib import Path
from random import Random
from typing import Any

import pytest

from infra.store import Store
from infra.store.records import sidecar_path
from tests.infra.integrity import PIECE


@pytest.mark.parametrize("size", [0, 1, PIECE, PIECE + 1, 8 * PIECE, 8 * PIECE + 1, 5 * 2**20 + 77])
def test_a_record_states_what_hashlib_says_of_the_bytes_and_of_their_pieces(store: Store, size: int) -> None:
    data = Random(size).randbytes(size)
    with store.writer("c/f/attempts/a/x.bin") as writer:
        for start in range(0, size, 100_001):
            writer.write(memoryview(data)[start : start + 100_001])
            assert writer.tell() == min(size, start + 100_001)
    record = writer.record
    assert (record.size, record.sha256) == (size, hashlib.sha256(data).hexdigest())
    pieces = [hashlib.sha256(data[start : start + PIECE]).digest() for start in range(0, size, PIECE)]
    assert (record.pieces is not None) == (size > PIECE)
    if size > 8 * PIECE:
        assert store.read_bytes(sidecar_path("c/f/attempts/a/x.bin")) == b"".join(pieces)
        assert record.pieces == hashlib.sha256(b"".join(pieces)).hexdigest()
    elif size > PIECE:
        assert record.pieces == [piece.hex() for piece in pieces]
    assert store.names("c/f/attempts/a") == ["x.bin"]
    reader = store.reader("c/f/attempts/a/x.bin", record)
    assert reader.bytes() == data
    for start, stop in ((0, size), (size // 3, size // 2), (size, size)):
        assert reader.read(start, stop) == data[start:stop]
    with pickle.loads(pickle.dumps(reader)).stream() as stream:
        stream.seek(size // 2)
        assert stream.read(10) == data[size // 2 :][:10]
        stream.seek(-min(7, size), 2)
        assert stream.read() == data[size - min(7, size) :]


def test_a_long_file_goes_up_in_parts_and_comes_down_whole(s3: str, tmp_path: Path) -> None:
    store, data = Store.open(f"{s3}/{tmp_path.name}"), Random(1).randbytes(40 * 2**20)
    (tmp_path / "local").write_bytes(data)
    record = store.upload(tmp_path / "local", "c/f/attempts/a/x.bin")
    assert record.sha256 == hashlib.sha256(data).hexdigest()
    head = store.fs.call_s3("head_object", Bucket="bucket", Key=f"{tmp_path.name}/c/f/attempts/a/x.bin")
    assert head["ETag"].endswith('-3"')  # parts of 16, 16 and 8 MiB
    store.reader("c/f/attempts/a/x.bin", record).download(tmp_path / "copy")
    assert (tmp_path / "copy").read_bytes() == data


def test_an_exception_in_the_block_leaves_nothing(store: Store) -> None:
    big = Random(1).randbytes(17 * 2**20)
    blocks: list[Any] = [big, "no bytes"]
    with pytest.raises(TypeError), store.writer("c/f/attempts/a/x.bin") as writer:
        deque(map(writer.write, blocks))
    assert [path for path in store.fs.find(store.root) if "format.json" not in path] == []
    if hasattr(store.fs, "call_s3"):
        assert "Uploads" not in store.fs.call_s3("list_multipart_uploads", Bucket="bucket")
