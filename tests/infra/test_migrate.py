"""Stores of format 1, as their bytes were: refused by name, migrated by a command, at whatever point it was interrupted before."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import fsspec
import pytest
from typer.testing import CliRunner

from flows.cli.__main__ import app
from infra.store import Artifact, Store, StoreError, migrate
from infra.store.verify import verify

LONG = bytes(range(256)) * 40  # ten pieces of the store below
PIECE = 1024
SHA = {data: hashlib.sha256(data).hexdigest() for data in (LONG, b"hello\n", b"unit", b"weights")}
HELLO = "5891b5b522d5df086d0ff0b110fbd9d21bb4fc7163af34d08286a2e846f6be03"  # sha256sum of "hello\n"

OLD = {
    "format.json": b'{\n "format": 1\n}\n',
    "inputs/aa.json": b'{"digest": "00", "url": "file:///x"}',
    "runs/mini/20260101T000000.000000Z-aa.json": b'{"parts": {}, "spec": {}}',
    "corpus/c1/identity.json": b'{"name": "text", "kind": "corpus", "version": 1, "fingerprint": "c1", "spec": {}, "inputs": {}}',
    "corpus/c1/attempts/one/units/task/tokens.bin": b"unit",
    "corpus/c1/units/task.json": (
        '{"attempt": "one", "data": {"documents": 3}, "files": {"tokens.bin": {"path": "corpus/c1/attempts/one/units/task/tokens.bin",'
        f' "sha256": "{SHA[b"unit"]}", "size": 4}}}}}}'
    ).encode(),
    "corpus/c1/attempts/two/train.bin": LONG,
    "corpus/c1/attempts/two/notes.txt": b"hello\n",
    "corpus/c1/attempts/two/log.txt": b"a log that no marker names",
    "corpus/c1/manifest.json": (
        f'{{"attempt": "two", "files": {{"notes.txt": {{"sha256": "{HELLO}", "size": 6}},'
        f' "train.bin": {{"sha256": "{SHA[LONG]}", "size": 10240}}}}, "metrics": {{"documents": 3}}, "facts": {{"train": ["train"]}}}}'
    ).encode(),
    "pretrain/p1/identity.json": (
        b'{"name": "train", "kind": "pretrain", "version": 1, "fingerprint": "p1", "spec": {},'
        b' "inputs": {"mixture": {"kind": "corpus", "fingerprint": "c1", "path": "corpus/c1"}}}'
    ),
    "pretrain/p1/attempts/one/step-00000010/__0_0.distcp": b"weights",
    "pretrain/p1/attempts/one/history/00000010.jsonl": b'{"step": 10, "loss": 2.5}\n',
    "pretrain/p1/checkpoints/00000010.json": (
        '{"step": 10, "attempt": "one", "attempts": ["one"], "folder": "step-00000010", "facts": {"tokens": 5},'
        f' "files": {{"__0_0.distcp": {{"sha256": "{SHA[b"weights"]}", "size": 7}}}}, "history": ["one/history/00000010.jsonl"],'
        ' "seconds": {"startup": 0.0, "compute": 1.0, "storage": 0.5}, "created": "2026-01-01T00:00:00+00:00"}'
    ).encode(),
    "pretrain/p1/manifest-00000010.json": (
        '{"attempt": "one", "step": 10, "checkpoint": "pretrain/p1/attempts/one/step-00000010", "metrics": {}, "facts": {},'
        f' "files": {{"step-00000010/__0_0.distcp": {{"sha256": "{SHA[b"weights"]}", "size": 7}}}},'
        ' "history": ["one/history/00000010.jsonl"]}'
    ).encode(),
}


@pytest.fixture(params=["file", "memory"])
def old(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    """The store above, opened by whom it is not refused."""
    url = str(tmp_path / "store") if request.param == "file" else f"memory://{tmp_path.name}"
    fs, root = fsspec.core.url_to_fs(url)
    for name, data in OLD.items():
        fs.makedirs(f"{root}/{name}".rsplit("/", 1)[0], exist_ok=True)
        fs.pipe_file(f"{root}/{name}", data)
    opened = Store.open(url, any_format=True)
    return Store(opened.fs, opened.root, piece_bytes=PIECE)


def contents(store: Store) -> dict[str, bytes]:
    store.fs.invalidate_cache()
    return {str(path)[len(store.root) :].lstrip("/"): store.fs.cat_file(path) for path in store.fs.find(store.root)}


def check_migrated(store: Store) -> None:
    """All that the old store said is said by the new one, and every file of it is there, unchanged."""
    found = contents(Store.open(store.url))
    for name, data in OLD.items():
        if "/attempts/" in name or name.startswith(("inputs", "runs")) or name.endswith("identity.json"):
            assert found[name] == data, name
        elif name != "format.json":
            new, before = json.loads(found[name]), json.loads(data)
            for record in new["files"].values():
                record.pop("pieces", None)
                record.pop("piece_bytes", None)
            if "history" in new:
                new["history"] = [entry["path"] for entry in new["history"]]
            assert new == before, name
    assert json.loads(found["format.json"]) == {"format": 2}
    assert verify(store).damages == []
    corpus, trained = Artifact(store, "corpus/c1"), Artifact(store, "pretrain/p1", 10)
    assert corpus.open("train.bin").digests == b"".join(hashlib.sha256(LONG[i : i + PIECE]).digest() for i in range(0, len(LONG), PIECE))
    assert corpus.open("train.bin").read(3000, 3010) == LONG[3000:3010]
    assert list(trained.history()) == [{"step": 10, "loss": 2.5}]
    trained.checkpoint(10).check()


def test_an_old_store_is_refused_with_its_name_and_the_command(old: Store) -> None:
    with pytest.raises(StoreError, match=r"has format 1, this program reads format 2: run apertus migrate --store (/|memory:)"):
        Store.open(old.url)


def test_a_newer_store_is_refused_with_its_name(tmp_path: Path) -> None:
    (tmp_path / "format.json").write_text('{"format": 3}')
    with pytest.raises(StoreError, match=rf"'{tmp_path}' has format 3, this program reads format 2; use a newer program"):
        Store.open(str(tmp_path))
    with pytest.raises(StoreError, match="this program migrates format 1 to 2"):
        migrate.migrate(Store.open(str(tmp_path), any_format=True))


def test_migrating_says_more_of_every_file_and_loses_nothing(old: Store) -> None:
    done = migrate.migrate(old)
    assert (done.damaged, done.lost) == ({}, [])
    check_migrated(old)
    before = contents(old)
    assert migrate.migrate(old).rewritten == []
    assert contents(old) == before


def test_migrating_is_finished_by_another_run_wherever_it_was_cut(old: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    written = [0]
    allowed = 0
    original = {name: getattr(Store, name) for name in ("replace", "read_range")}

    class Killed(BaseException):
        pass

    def counted(name: str) -> Any:
        def call(self: Store, *arguments: Any) -> Any:
            written[0] += 1
            if written[0] > allowed:
                raise Killed
            return original[name](self, *arguments)

        return call

    for name in original:
        monkeypatch.setattr(Store, name, counted(name))
    for cut in range(40):
        written[0], allowed = 0, cut
        for name, data in OLD.items():
            old.fs.pipe_file(f"{old.root}/{name}", data)
        try:
            migrate.migrate(old)
            break
        except Killed:
            document = json.loads(contents(old)["format.json"])
            assert document in ({"format": 1}, {"format": 2, "migrating_from": 1})
            with pytest.raises(StoreError, match="run apertus migrate --store"):
                Store.open(old.url)
        allowed = 10**9
        migrate.migrate(old)
        check_migrated(old)
    else:
        raise AssertionError("it never came to its end")
    assert cut == 10  # requests of the whole migration: each was the last one once


def test_what_was_damaged_before_is_withdrawn_and_the_rest_is_migrated(old: Store) -> None:
    old.fs.pipe_file(old.full("corpus/c1/attempts/two/train.bin"), LONG[:-1] + b"?")
    done = migrate.migrate(old)
    assert list(done.damaged) == ["corpus/c1/manifest.json"]
    assert "train.bin' is damaged" in done.damaged["corpus/c1/manifest.json"]
    found = contents(old)
    kept = [data for name, data in found.items() if name.startswith("damaged/") and name.endswith("corpus/c1/manifest.json")]
    assert kept == [OLD["corpus/c1/manifest.json"]]
    assert not Artifact(Store.open(old.url), "corpus/c1").complete
    assert verify(old).damages == []


@pytest.mark.parametrize("place", ["../../../secret", "/etc/passwd", "other/o1/attempts/a/x"])
def test_a_marker_that_leads_elsewhere_is_withdrawn(old: Store, place: str) -> None:
    unit = json.loads(OLD["corpus/c1/units/task.json"])
    unit["files"]["tokens.bin"]["path"] = place
    old.fs.pipe_file(old.full("corpus/c1/units/task.json"), json.dumps(unit).encode())
    assert list(migrate.migrate(old).damaged) == ["corpus/c1/units/task.json"]


def test_the_command_migrates(tmp_path: Path) -> None:
    for name, data in OLD.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(data)
    result = CliRunner().invoke(app, ["migrate", "--store", str(tmp_path)])
    assert (result.exit_code, "2 markers were brought to this format" in result.output) == (0, True)  # those with rows of metrics
    Store.open(str(tmp_path))
    assert CliRunner().invoke(app, ["migrate", "--store", str(tmp_path / "none")]).exit_code == 2
