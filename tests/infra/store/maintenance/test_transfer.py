"""Copies of what a store has: on disk, in memory, and on an S3 server."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import infra.store.maintenance.transfer as copying
from infra.store import Artifact, Store, StoreError
from infra.store.documents import to_json
from infra.store.maintenance.transfer import closure, copy_artifacts
from infra.store.maintenance.verify import verify
from infra.store.reading.walk import list_files, open_contents
from tests.infra.maker import WEB, Maker, Stopped, sound
from tests.infra.moto import Moto
from tests.infra.store.attempts import attempt


@pytest.fixture
def bucket(moto: Moto) -> Iterator[str]:
    with moto.in_environment() as url:
        yield url


def fill(store: Store, scratch: Path) -> str:
    maker = Maker(store, scratch)
    corpus = maker.data("corpus", "a", inputs=WEB)
    store.write_once("inputs/k1.json", to_json({"digest": "d1", "url": "u"}))
    store.write_once("inputs/d1.files.jsonl", b"")
    trained = maker.training("b", [10, 20, 30], [20], (corpus, None))
    maker.attempt("pretrain", "b", (corpus, None), name="dead").write_bytes("half", b"x")
    store.write_once(f"{trained}/leases/1.json", b"{}")
    return maker.data("export", "c", (trained, 20))


@pytest.mark.parametrize("way", ["memory", "s3", "back"])
def test_a_copy_has_what_markers_name_and_nothing_else(tmp_path: Path, bucket: str, way: str) -> None:
    local, remote = (
        str(tmp_path / "store"),
        f"memory://{uuid.uuid4().hex}" if way == "memory" else f"{bucket}/{uuid.uuid4().hex}",
    )
    source, target = (Store.open(url) for url in ((remote, local) if way == "back" else (local, remote)))
    source.initialise()
    export = fill(source, tmp_path / "scratch")
    amount = copy_artifacts(source, target, closure(source, [(export, None)]))
    listing = list_files(target)
    [trained] = source.names("pretrain")
    assert set(listing) == set(list_files(source)) - {
        f"pretrain/{trained}/{name}"
        for name in (
            *("leases/1.json", "attempts/dead/half", "checkpoints/00000030.json"),
            *("attempts/first/step-00000030/shard", "attempts/first/history/00000030.parquet"),
        )
    }
    assert amount.artifacts == 3 and amount.present_files == 0
    for name in listing:
        assert target.read_bytes(name) == source.read_bytes(name)
    sound(target)
    again = copy_artifacts(source, target, closure(source, [(export, None)]))
    assert (again.files, again.present_files) == (0, amount.files)


def test_an_interrupted_copy_is_sound_and_resumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = Store.open(str(tmp_path / "store"))
    source.initialise()
    export = fill(source, tmp_path / "scratch")
    whole = copy_artifacts(
        source, Store.open(f"memory://{uuid.uuid4().hex}"), closure(source, [(export, None)])
    )
    for calls in range(8):
        target = Store.open(str(tmp_path / f"target-{calls}"))
        left = [calls]
        original = copying._copy_file

        def one_file(
            source: Store,
            target: Store,
            name: str,
            record: Any,
            left: list[int] = left,
            original: Any = original,
        ) -> Any:
            if not left[0]:
                target.write_bytes(name, b"half")
                raise Stopped
            left[0] -= 1
            return original(source, target, name, record)

        monkeypatch.setattr(copying, "_copy_file", one_file)
        try:
            copy_artifacts(source, target, closure(source, [(export, None)]))
        except Stopped:
            pass
        monkeypatch.undo()
        sound(target)
        rest = copy_artifacts(source, target, closure(source, [(export, None)]))
        sound(target)
        assert rest.files + rest.present_files == whole.files
        # chunks of the history have no digest, and are copied again
        assert rest.present_files >= min(calls, whole.files) - 2
        assert Artifact(target, export).complete


@pytest.mark.parametrize("size", [7, 9 * 2**20])  # the digests of more than eight pieces lie in a sidecar
def test_a_copy_of_unfinished_work_knows_which_files_were_used_up(tmp_path: Path, size: int) -> None:
    source, target = Store.open(str(tmp_path / "store")), Store.open(str(tmp_path / "target"))
    source.initialise()
    corpus = attempt(source, tmp_path)
    corpus.begin()
    for name in ("used", "unused"):
        (tmp_path / name).write_bytes(b"x" * size)
    corpus.commit_unit("task", files={name: tmp_path / name for name in ("used", "unused")})
    unit = corpus.committed_unit("task")
    corpus.remove_files(unit, ["used"])
    amount = copy_artifacts(source, target, closure(source, [(corpus.job.path, None)]))
    assert amount.files == 1 and not verify(source).damages and not verify(target).damages
    target.remove(unit.files["unused"].path)
    assert [damage.file for damage in verify(target).damages] == [unit.files["unused"].path]


@pytest.mark.parametrize("damage", [b"X" * 1000, b"a" * 999, None])
def test_what_is_damaged_is_not_copied_and_named(tmp_path: Path, damage: bytes | None) -> None:
    source, target = Store.open(str(tmp_path / "store")), Store.open(str(tmp_path / "target"))
    source.initialise()
    export = fill(source, tmp_path / "scratch")
    [corpus] = source.names("corpus")
    name = f"corpus/{corpus}/attempts/first/data.bin"
    source.remove(name)
    if damage is not None:
        source.write_once(name, damage)
    with pytest.raises(StoreError, match=r"data\.bin' .*nothing that names it was copied"):
        copy_artifacts(source, target, closure(source, [(export, None)]))
    assert not Artifact(target, f"corpus/{corpus}").complete
    assert not target.exists(name)


def test_a_marker_that_names_files_of_another_place_is_damaged(tmp_path: Path) -> None:
    source = Store.open(str(tmp_path / "store"))
    source.initialise()
    export = fill(source, tmp_path / "scratch")
    document = json.loads(source.read_bytes(f"{export}/manifest.json"))
    document["files"]["../../../../corpus/x"] = {"size": 1, "sha256": "0"}
    source.fs.pipe_file(source.full(f"{export}/manifest.json"), to_json(document))
    assert list(open_contents(source, export).damaged) == [f"{export}/manifest.json"]
    with pytest.raises(StoreError, match="is damaged"):
        closure(source, [(export, None)])
