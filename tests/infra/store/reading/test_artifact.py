"""What is read of an artifact is what its markers name; damage is noticed."""

from __future__ import annotations

from pathlib import Path

import pytest

from infra.store import Artifact, Store, StoreError
from tests.infra.sealed import sealed
from tests.infra.store.attempts import attempt, save


def test_an_artifact_is_visible_when_its_manifest_is_there_and_not_before(
    store: Store, tmp_path: Path
) -> None:
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


@pytest.mark.parametrize("damage", [b"abX", b"ab", b""])
def test_damage_is_noticed_on_reading(store: Store, tmp_path: Path, damage: bytes) -> None:
    writing = attempt(store, tmp_path)
    writing.write_bytes("data.bin", b"abc")
    writing.commit(metrics={})
    store.fs.pipe_file(store.full(writing.folder("data.bin")), damage)
    with pytest.raises(StoreError, match=r"data\.bin' is damaged"):
        Artifact(store, writing.job.path).bytes("data.bin")


def test_a_damaged_checkpoint_is_noticed(store: Store, tmp_path: Path) -> None:
    writing = attempt(store, tmp_path, path="pretrain/f")
    save(writing, 10)
    checkpoint = writing.commit_checkpoint(10, {}, files=sealed(writing, 10))
    checkpoint.check()
    store.fs.pipe_file(store.full(f"{checkpoint.folder}/shard.bin"), b"weights 11")
    with pytest.raises(StoreError, match="damaged"):
        checkpoint.check()
    store.fs.rm(store.full(f"{checkpoint.folder}/shard.bin"))
    with pytest.raises(StoreError, match="missing"):
        checkpoint.check()


def test_the_history_continues_over_attempts_without_duplicates(store: Store, tmp_path: Path) -> None:
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
