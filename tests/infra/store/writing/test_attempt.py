"""What an attempt commits is committed once."""

from __future__ import annotations

from pathlib import Path

from infra.store import Artifact, Store
from tests.infra.sealed import sealed
from tests.infra.store.attempts import attempt, save


def test_a_second_attempt_cannot_change_what_is_committed(store: Store, tmp_path: Path) -> None:
    for name, content in (("first", b"one"), ("second", b"two")):
        writing = attempt(store, tmp_path, name)
        writing.begin()
        writing.write_bytes("data.bin", content)
        writing.commit(metrics={})
    artifact = Artifact(store, writing.job.path)
    assert artifact.manifest.attempt == "first"
    assert artifact.bytes("data.bin") == b"one"


def test_a_unit_is_done_once_whichever_attempt_did_it(store: Store, tmp_path: Path) -> None:
    local = tmp_path / "unit.txt"
    local.write_text("work")
    first, second = attempt(store, tmp_path, "first"), attempt(store, tmp_path, "second")
    assert first.unit("task-0") is None
    first.commit_unit("task-0", files={"unit.txt": local}, data={"documents": 3})
    committed = first.committed_unit("task-0")
    assert committed.data == {"documents": 3}
    second.commit_unit("task-0", files={"unit.txt": local}, data={"documents": 4})
    assert second.unit("task-0") == first.unit("task-0") == committed
    assert store.read_bytes(committed.files["unit.txt"].path) == b"work"


def test_a_checkpoint_without_its_marker_is_never_seen(store: Store, tmp_path: Path) -> None:
    writing = attempt(store, tmp_path, path="pretrain/f")
    save(writing, 10)
    assert writing.artifact.checkpoint_steps() == []
    writing.commit_checkpoint(10, {"tokens": 100}, files=sealed(writing, 10))
    assert writing.artifact.checkpoint_steps() == [10]
    assert writing.artifact.checkpoint(10).facts == {"tokens": 100}
