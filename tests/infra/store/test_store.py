"""The store: write-once markers, nothing outside the root, nothing read that no marker names, damage noticed."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import fsspec
import pytest

from infra.store import Artifact, Attempt, Store, StoreError
from specs.job import Job
from tests.infra.sealed import sealed
from tests.infra.store.racing import winners


@pytest.fixture(params=["file", "memory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    opened = Store.open(str(tmp_path / "store") if request.param == "file" else f"memory://{tmp_path.name}")
    opened.initialise()
    return opened


def attempt(store: Store, tmp_path: Path, name: str = "first", **fields: Any) -> Attempt:
    values: dict[str, Any] = {
        "node": "n",
        "kind": "corpus",
        "version": 1,
        "fingerprint": "f" * 32,
        "spec": {},
        "identity": {"seed": 1},
        "inputs": {},
        "launch": {},
        "store": store.url,
        "path": f"corpus/{'f' * 32}",
        "attempt": name,
        "scratch": str(tmp_path / f"scratch-{name}"),
        "progress": str(tmp_path / "progress"),
    }
    return Attempt(Job(**(values | fields)), store)


def test_a_marker_is_written_once_and_the_first_writer_wins(store: Store) -> None:
    assert store.write_once("a/b.json", b"1")
    assert not store.write_once("a/b.json", b"2")
    assert store.read_bytes("a/b.json") == b"1"
    assert store.names("a") == ["b.json"]


def test_of_many_writers_at_once_one_wins(tmp_path: Path) -> None:
    store = Store.open(str(tmp_path))
    wins = winners(store, 16)
    assert len(wins) == 1
    assert store.read_bytes("marker.json") == str(wins[0]).encode()


@pytest.mark.parametrize("path", ["../x", "/etc/passwd", "a/../../x", "", "a\\b"])
def test_no_path_leaves_the_store(store: Store, path: str) -> None:
    with pytest.raises(StoreError, match="not a path inside"):
        store.read_bytes(path)


def test_a_link_out_of_the_store_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("x")
    store = Store.open(str(tmp_path / "store"))
    store.initialise()
    os.symlink(tmp_path, tmp_path / "store" / "link")
    with pytest.raises(StoreError, match="through a link"):
        store.read_bytes("link/secret")


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ('{"format": 0}', "has format 0, this program reads format 3. Fix: {new}"),
        ('{"format": 2}', "has format 2, this program reads format 3. Fix: {new}"),
        ('{"format": 4}', "has format 4, this program reads format 3. Fix: {upgrade}"),
        ('{"format": 99}', "has format 99, this program reads format 3. Fix: {upgrade}"),
    ],
)
def test_a_store_of_another_format_is_refused_with_its_name_and_what_to_do(tmp_path: Path, document: str, message: str) -> None:
    (tmp_path / "format.json").write_text(document)
    with pytest.raises(StoreError) as refused:
        Store.open(str(tmp_path))
    new = "use a new store (--store)"
    upgrade = "use a newer release of this program, or a new store (--store)"
    assert str(refused.value) == f"the store '{tmp_path}' {message.format(new=new, upgrade=upgrade)}"
    assert os.listdir(tmp_path) == ["format.json"] and (tmp_path / "format.json").read_text() == document


def test_an_artifact_is_visible_when_its_manifest_is_there_and_not_before(store: Store, tmp_path: Path) -> None:
    writing = attempt(store, tmp_path)
    writing.begin()
    writing.write_bytes("data.bin", b"abc")
    artifact = Artifact(store, writing.job.path)
    assert not artifact.complete
    with pytest.raises(StoreError, match="not in the store"):
        artifact.bytes("data.bin")
    writing.commit(metrics={"n": 1})
    assert artifact.complete
    assert artifact.bytes("data.bin") == b"abc"
    assert artifact.local("data.bin").read_bytes() == b"abc"
    assert artifact.manifest.files["data.bin"].size == 3
    assert artifact.manifest.seconds is not None and artifact.manifest.seconds.compute >= 0


def test_a_second_attempt_cannot_change_what_is_committed(store: Store, tmp_path: Path) -> None:
    for name, content in (("first", b"one"), ("second", b"two")):
        writing = attempt(store, tmp_path, name)
        writing.begin()
        writing.write_bytes("data.bin", content)
        writing.commit(metrics={})
    artifact = Artifact(store, writing.job.path)
    assert artifact.manifest.attempt == "first"
    assert artifact.bytes("data.bin") == b"one"


@pytest.mark.parametrize("damage", [b"abX", b"ab", b""])
def test_damage_is_noticed_on_reading(store: Store, tmp_path: Path, damage: bytes) -> None:
    writing = attempt(store, tmp_path)
    writing.write_bytes("data.bin", b"abc")
    writing.commit(metrics={})
    store.fs.pipe_file(store.full(writing.folder("data.bin")), damage)
    with pytest.raises(StoreError, match=r"data\.bin' is damaged"):
        Artifact(store, writing.job.path).bytes("data.bin")


def test_a_unit_is_done_once_whichever_attempt_did_it(store: Store, tmp_path: Path) -> None:
    local = tmp_path / "unit.txt"
    local.write_text("work")
    first, second = attempt(store, tmp_path, "first"), attempt(store, tmp_path, "second")
    assert first.unit("task-0") is None
    committed = first.commit_unit("task-0", files={"unit.txt": local}, data={"documents": 3})
    assert second.unit("task-0") == committed
    assert second.commit_unit("task-0", files={"unit.txt": local}, data={"documents": 4}) == committed
    assert store.read_bytes(committed.files["unit.txt"].path) == b"work"


def save(writing: Attempt, step: int) -> None:
    folder = writing.folder(Attempt.checkpoint_folder(step))
    writing.store.fs.makedirs(writing.store.full(folder), exist_ok=True)
    writing.store.fs.pipe_file(writing.store.full(f"{folder}/shard.bin"), f"weights {step}".encode())


def test_a_checkpoint_without_its_marker_is_never_seen(store: Store, tmp_path: Path) -> None:
    writing = attempt(store, tmp_path, kind="pretrain", path="pretrain/f")
    save(writing, 10)
    assert writing.artifact.checkpoint_steps() == []
    writing.commit_checkpoint(10, {"tokens": 100}, files=sealed(writing, 10))
    assert writing.artifact.checkpoint_steps() == [10]
    assert writing.artifact.checkpoint(10).facts == {"tokens": 100}


def test_a_damaged_checkpoint_is_noticed(store: Store, tmp_path: Path) -> None:
    writing = attempt(store, tmp_path, kind="pretrain", path="pretrain/f")
    save(writing, 10)
    checkpoint = writing.commit_checkpoint(10, {}, files=sealed(writing, 10))
    checkpoint.check()
    store.fs.pipe_file(store.full(f"{checkpoint.folder}/shard.bin"), b"weights 11")
    with pytest.raises(StoreError, match="damaged"):
        checkpoint.check()
    store.fs.rm(store.full(f"{checkpoint.folder}/shard.bin"))
    with pytest.raises(StoreError, match="missing"):
        checkpoint.check()


def test_the_history_goes_on_over_attempts_without_duplicates(store: Store, tmp_path: Path) -> None:
    path = {"kind": "pretrain", "path": "pretrain/f"}
    first = attempt(store, tmp_path, "first", **path)
    for step in range(1, 13):
        first.add_metrics({"step": step, "loss": 1.0 / step})
        if step == 10:
            save(first, 10)
            first.commit_checkpoint(10, {}, files=sealed(first, 10))
    # steps 11 and 12 die with the first attempt
    second = attempt(store, tmp_path, "second", resume_step=10, **path)
    for step in range(11, 16):
        second.add_metrics({"step": step, "loss": 1.0 / step})
    save(second, 15)
    second.commit_checkpoint(15, {}, files=sealed(second, 15))
    second.commit(metrics={}, step=15)
    rows = list(Artifact(store, "pretrain/f", 15).history())
    assert [row["step"] for row in rows] == list(range(1, 16))
    assert second.artifact.checkpoint(15).marker.attempts == ["first", "second"]


def test_the_store_knows_its_own_url(tmp_path: Path) -> None:
    assert Store.open(f"file://{tmp_path}/s").url == str(tmp_path / "s")
    assert Store.open("memory://bucket/s").url == "memory:///bucket/s"
    assert isinstance(Store.open("memory://bucket/s").fs, fsspec.get_filesystem_class("memory"))


def test_an_unknown_protocol_is_a_message() -> None:
    with pytest.raises(StoreError, match="cannot open the store"):
        Store.open("nonsense://bucket")
