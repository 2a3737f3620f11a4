"""Stores on S3 servers: what is the same on every kind of storage, and what one server shows best.

moto's server has conditional writes that are atomic; Swift keeps what it holds when it is killed, and is
quick.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random

import pytest
import s3fs

from infra.store import Artifact, Attempt, Store, StoreError
from infra.store.documents import to_json
from tests.infra.committed import damaged
from tests.infra.moto import Moto
from tests.infra.s3 import requests
from tests.infra.swift import Swift
from tests.jobs import job_at

MEGABYTE = 2**20


def attempt(store: Store, scratch: Path, name: str = "first", **fields: object) -> Attempt:
    job = job_at("pretrain/" + "f" * 32, store, scratch, name, identity={"seed": 1}, **fields)
    return Attempt(job, store)


def save(writing: Attempt, step: int, size: int = 100) -> None:
    """A checkpoint of two ranks."""
    folder = writing.folder(Attempt.checkpoint_folder(step))
    files = {}
    for rank in range(2):
        with writing.store.writer(f"{folder}/__{rank}_0.distcp") as file:
            file.write(Random(step + rank).randbytes(size))
        files[f"__{rank}_0.distcp"] = file.record
    writing.add_metrics({"step": step, "loss": 1.0 / step})
    writing.commit_checkpoint(step, {"tokens": step}, files=files)


@pytest.fixture
def on_swift(swift: Swift) -> Iterator[Store]:
    with swift.in_environment() as bucket:
        store = Store.open(f"{bucket}/store")
        store.initialise()
        yield store


@pytest.fixture
def on_moto(moto: Moto) -> Iterator[Store]:
    with moto.in_environment() as bucket:
        store = Store.open(f"{bucket}/store")
        store.initialise()
        yield store


def test_what_is_written_is_read_back_on_any_storage(
    any_store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("APERTUS_CACHE", str(tmp_path / "cache"))
    writing = attempt(any_store, tmp_path)
    writing.begin()
    local = tmp_path / "local.bin"
    local.write_bytes(Random(1).randbytes(3 * MEGABYTE))
    assert writing.unit("a") is None
    writing.commit_unit("a", files={"a.bin": local}, data=[1])
    unit = writing.committed_unit("a")
    assert unit.data == [1] and attempt(any_store, tmp_path, "second").unit("a") == unit
    for step in (1, 2, 3):
        save(writing, step)
    writing.put(local, "b.bin")
    writing.commit(metrics={"m": 1.5}, step=3)
    artifact = Artifact(any_store, writing.job.path, 3)
    assert artifact.complete and artifact.manifest.metrics == {"m": 1.5}
    assert artifact.checkpoint_steps() == [1, 2, 3]
    assert [row["step"] for row in artifact.history()] == [1, 2, 3]
    for step in (1, 2, 3):
        artifact.checkpoint(step).check()
    assert not any_store.write_once(artifact.manifest_path, b"another")
    assert damaged(any_store.fs, any_store.root) == []
    any_store.remove(writing.job.path)
    assert any_store.names("pretrain") == []


def test_of_sixteen_writers_one_wins(on_moto: Store) -> None:
    for number in range(5):
        assert len(winners(on_moto, f"markers/{number}.json")) == 1


def winners(store: Store, path: str) -> list[int]:
    """Which of 16 threads that write a marker at the same time are told that it is theirs; its content is
    that of one of them."""
    wins: list[int] = []
    barrier = threading.Barrier(16)

    def write(writer: int) -> None:
        barrier.wait()
        if store.write_once(path, to_json({"writer": writer})):
            wins.append(writer)

    threads = [threading.Thread(target=write, args=(writer,)) for writer in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert store.read_json(path)["writer"] in wins
    return wins


def test_a_marker_that_is_there_is_not_written_again_where_conditions_are_checked_late(
    on_swift: Store,
) -> None:
    """Swift refuses the second of two writers by an error that s3fs does not know, and only if the first
    one has ended."""
    assert on_swift.write_once("marker.json", b"1")
    with pytest.raises(OSError, match="precondition"):
        on_swift.fs.pipe_file(on_swift.full("marker.json"), b"2", mode="create")
    assert not on_swift.write_once("marker.json", b"2")
    assert on_swift.read_bytes("marker.json") == b"1"


def test_what_is_committed_outlives_the_server(on_swift: Store, swift: Swift, tmp_path: Path) -> None:
    writing = attempt(on_swift, tmp_path)
    for step in (1, 2):
        save(writing, step, size=2 * MEGABYTE)
    with swift.gone():
        pass
    store = Store(s3fs.S3FileSystem(skip_instance_cache=True), on_swift.root)
    artifact = Artifact(store, writing.job.path)
    assert artifact.checkpoint_steps() == [1, 2]
    for step in (1, 2):
        artifact.checkpoint(step).check()


@pytest.mark.slow
def test_a_server_that_is_killed_in_the_middle_of_an_upload(on_swift: Store, swift: Swift) -> None:
    """The parts of a multipart upload that are in are no file: it ends whole, or as an error, and can be
    made again."""
    data = [Random(number).randbytes(MEGABYTE) for number in range(40)]
    fresh = uncached(on_swift)

    def upload(store: Store, middle: Callable[[], None]) -> None:
        with store.writer("big.bin") as file:
            for number, chunk in enumerate(data):
                if number == 36:  # the first parts are there, the others not
                    middle()
                file.write(chunk)

    def restart() -> None:
        with swift.gone():
            pass

    try:
        upload(uncached(on_swift), restart)
    except (OSError, StoreError):
        assert not fresh.exists("big.bin")
        upload(fresh, lambda: None)
    assert hashlib.sha256(fresh.read_bytes("big.bin")).digest() == hashlib.sha256(b"".join(data)).digest()


@pytest.mark.slow
def test_a_server_that_is_killed_in_the_middle_of_a_download(
    on_swift: Store, swift: Swift, monkeypatch: pytest.MonkeyPatch
) -> None:
    # of a request; four of 24 are under way
    monkeypatch.setattr("infra.store.files.reader.FETCH_BYTES", MEGABYTE)
    data = Random(3).randbytes(24 * MEGABYTE)
    record = on_swift.write_bytes("big.bin", data)
    blocks = uncached(on_swift).reader("big.bin", record).blocks()
    found = next(blocks)
    with swift.gone():
        pass
    assert found + b"".join(blocks) == data


def uncached(store: Store) -> Store:
    """The same store, by a client that knows nothing of it, and uploads in small parts."""
    return Store(s3fs.S3FileSystem(skip_instance_cache=True, default_block_size=5 * MEGABYTE), store.root)


def test_what_a_checkpoint_costs_does_not_grow_with_the_steps_that_are_kept(
    on_moto: Store, tmp_path: Path
) -> None:
    """Requests as the server sees them: of the commit, of finding the last checkpoint, and of the plan's
    question what there is."""
    writing = attempt(on_moto, tmp_path)
    costs = []
    for step in (1, 2, 100):
        for before in range(3, 100 if step == 100 else 3):
            on_moto.write_once(f"{writing.job.path}/checkpoints/{before:08d}.json", b"{}")
        on_moto.fs.invalidate_cache()
        with requests() as sent:
            save(writing, step)
        committing = dict(sent)
        with requests() as sent:
            assert max(writing.artifact.checkpoint_steps()) == step
        costs.append((committing, dict(sent)))
    assert costs[1] == costs[2]
    assert costs[2][1] == {"ListObjectsV2": 1}
