"""What is written is what is read, on any storage: digests of files and of their pieces, and names that lead nowhere else."""

from __future__ import annotations

import hashlib
import json
import pickle
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest

from infra.store import Artifact, DamagedError, Store, StoreError
from infra.store.documents import to_json
from infra.store.records import sidecar_path
from tests.infra.integrity import PIECE, attempt, bucket, quick

PLACES = ("file", "memory", "s3")


@pytest.fixture(scope="module")
def s3() -> Iterator[str]:
    """URL of a bucket."""
    yield from bucket()


@pytest.fixture(params=PLACES)
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    url = {"file": lambda: str(tmp_path / "store"), "memory": lambda: f"memory://{tmp_path.name}"}.get(request.param)
    opened = Store.open(url() if url else f"{request.getfixturevalue('s3')}/{tmp_path.name}")
    made = Store(opened.fs, opened.root, retry=quick(), piece_bytes=PIECE)
    made.initialise()
    return made


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


@pytest.mark.parametrize("damage", ["flipped", "shorter", "longer", "gone", "digests"])
def test_a_checkpoint_that_was_altered_is_refused(store: Store, tmp_path: Path, damage: str) -> None:
    writing, data = attempt(store, tmp_path), Random(2).randbytes(20 * PIECE)
    name = writing.folder("step-00000010/__0_0.distcp")
    with store.writer(name) as writer:
        writer.write(data)
    checkpoint = writing.commit_checkpoint(10, {"tokens": 1}, files={"__0_0.distcp": writer.record})
    checkpoint.check()
    assert checkpoint.files == {"__0_0.distcp": writer.record}
    altered = bytearray(data)
    altered[5000] ^= 4
    changes = {"flipped": bytes(altered), "shorter": data[:-1], "longer": data + b"1"}
    if damage == "gone":
        store.fs.rm(store.full(name))
    elif damage == "digests":
        store.fs.pipe_file(store.full(sidecar_path(name)), b"1" * 20 * 32)
    else:
        store.fs.pipe_file(store.full(name), changes[damage])
    said = {"flipped": r"piece 4 of 20 \(bytes 4096 to 5120\)", "shorter": "20479 bytes", "longer": "20481 bytes", "gone": "missing"}
    with pytest.raises(DamagedError, match=said.get(damage, r"\.pieces' is damaged")):
        checkpoint.check()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *[(field, value) for field in ("attempt", "folder") for value in ("..", "../../x", "/etc", "a/../..", "a\\b", "a\0", "", 7)],
        *[("files", {name: {"size": 1, "sha256": "0" * 64}}) for name in ("../x", "/etc/passwd", "a//b", "./a", "a/..", "\0")],
        *[("files", {"a": record}) for record in ({}, 5, {"size": -1, "sha256": "0" * 64}, {"size": 1, "sha256": "../../x"})],
        ("files", {"a": {"size": 9, "sha256": "0" * 64, "pieces": ["0" * 64], "piece_bytes": 0}}),
        ("history", [{"path": "../../secret", "size": 1, "sha256": "0" * 64}]),
        ("step", 11),
    ],
)
def test_a_marker_leads_nowhere_out_of_the_artifact(tmp_path: Path, field: str, value: Any) -> None:
    store = Store.open(str(tmp_path))
    writing = attempt(store, tmp_path)
    with store.writer(writing.folder("step-00000010/w")) as writer:
        writer.write(b"x")
    marker = writing.commit_checkpoint(10, {}, files={"w": writer.record}).marker
    store.replace("pretrain/f/checkpoints/00000010.json", json.dumps(json.loads(to_json(marker)) | {field: value}).encode())
    with pytest.raises(StoreError, match=r"not a path inside the store|is damaged"):
        Artifact(store, "pretrain/f").checkpoint(10)


def test_a_unit_names_files_of_its_own_artifact_only(store: Store, tmp_path: Path) -> None:
    writing = attempt(store, tmp_path)
    (tmp_path / "file").write_bytes(b"x")
    unit = writing.commit_unit("a", files={"f": tmp_path / "file"})
    elsewhere = unit.files["f"].model_copy(update={"path": "corpus/other/attempts/a/secret"})
    store.write_once("pretrain/f/units/b.json", to_json(unit.model_copy(update={"files": {"f": elsewhere}})))
    with pytest.raises(StoreError, match="not a path inside the artifact"):
        writing.unit("b")
