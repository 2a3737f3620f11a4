"""A store on a filesystem without hard links, as FAT, exFAT, and some mounts by FUSE and SMB."""

from __future__ import annotations

import errno
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from fsspec.implementations.local import LocalFileSystem

from infra.store import Artifact, StorageError, Store
from infra.store.storage import local
from tests.infra.integrity import quick
from tests.infra.maker import Maker
from tests.infra.store.racing import winners

REFUSALS = [errno.EPERM, errno.EACCES, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EXDEV]
refusals = pytest.mark.parametrize("refusal", REFUSALS, ids=errno.errorcode.get)


def refuse_links(monkeypatch: pytest.MonkeyPatch, refusal: int) -> None:
    def refuse(source: object, target: object) -> None:
        raise OSError(refusal, os.strerror(refusal))

    monkeypatch.setattr(os, "link", refuse)


def files(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


@refusals
def test_one_of_many_writers_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refusal: int) -> None:
    refuse_links(monkeypatch, refusal)
    store = Store.open(str(tmp_path))
    wins = winners(store, 8)
    assert len(wins) == 1
    assert store.read_bytes("marker.json") == str(wins[0]).encode()
    assert files(tmp_path) == ["marker.json"]


@refusals
def test_a_marker_is_written_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refusal: int) -> None:
    refuse_links(monkeypatch, refusal)
    store = Store.open(str(tmp_path / "store"))
    store.initialise()
    maker = Maker(store, tmp_path / "scratch")
    trained = maker.training("a", [10, 20], [20])
    finished = Artifact(store, trained, 20)
    manifest = store.read_bytes(finished.manifest_path)
    maker.training("a", [10, 20], [20])
    assert store.read_bytes(finished.manifest_path) == manifest
    assert Artifact(store, trained).checkpoint_steps() == [10, 20]
    Artifact(store, trained).checkpoint(20).check()
    assert not [name for name in files(tmp_path / "store") if ".tmp" in name]


@pytest.mark.parametrize("refusal", [errno.EIO, errno.ENOSPC, errno.EROFS], ids=errno.errorcode.get)
def test_another_error_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refusal: int) -> None:
    refuse_links(monkeypatch, refusal)
    with pytest.raises(OSError, match=os.strerror(refusal)):
        local.write_once(tmp_path / "marker.json", b"1")
    assert files(tmp_path) == []


@pytest.mark.parametrize("jump", [0, -86_400, 86_400])
def test_a_claim_is_taken_over_after_so_many_looks_whatever_the_clocks_say(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_links: None, jump: int
) -> None:
    """Its writer died, or is slow: it has as long as anybody."""
    looks: list[float] = []
    claim = tmp_path / ".tmp-claim-0-marker.json"
    claim.touch()
    os.utime(claim, (time.time() + jump,) * 2)
    monkeypatch.setattr(time, "sleep", looks.append)
    assert Store.open(str(tmp_path)).write_once("marker.json", b"1")
    assert sum(looks) == pytest.approx(30)
    assert files(tmp_path) == ["marker.json"]


@pytest.mark.usefixtures("no_links")
def test_of_several_that_take_over_a_claim_one_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All find that its writer has died before the first acts; then each works as long as the others need."""
    rename, exists, together, looked = os.rename, Path.exists, threading.Barrier(4), threading.local()

    def looks(path: Path) -> bool:
        found = exists(path)
        if not getattr(looked, "once", False):
            looked.once = True
            together.wait()
        return found

    monkeypatch.setattr(local, "CLAIM_LOOKS", 3)
    monkeypatch.setattr(os, "rename", lambda *names: (time.sleep(0.1), rename(*names)))
    monkeypatch.setattr(local, "CLAIM_PAUSE", 0.1)
    monkeypatch.setattr(Path, "exists", looks)
    (tmp_path / ".tmp-claim-0-marker.json").touch()
    with ThreadPoolExecutor(4) as writers:
        marker = tmp_path / "marker.json"
        won = [*writers.map(lambda number: local.write_once(marker, b"%d" % number), range(4))]
    assert won.count(True) == 1
    assert (tmp_path / "marker.json").read_bytes() == b"%d" % won.index(True)
    assert files(tmp_path) == ["marker.json"]


@pytest.mark.parametrize(("refusal", "needed"), [(errno.EINVAL, False), (errno.EIO, True)])
def test_a_filesystem_that_does_not_sync_folders_is_taken_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refusal: int, needed: bool
) -> None:
    fsync = os.fsync

    def refuse(number: int) -> None:
        if os.path.isdir(f"/proc/self/fd/{number}"):
            raise OSError(refusal, os.strerror(refusal))
        fsync(number)

    monkeypatch.setattr(os, "fsync", refuse)
    if needed:
        with pytest.raises(StorageError, match="could not be made durable"):
            local.write_once(tmp_path / "marker.json", b"1")
    else:
        assert local.write_once(tmp_path / "marker.json", b"1")
        local.replace(tmp_path / "marker.json", b"2")
        assert (tmp_path / "marker.json").read_bytes() == b"2"


@pytest.mark.parametrize("at", [1, 2])
def test_a_failed_sync_is_not_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: int) -> None:
    """Of a file's content, then of its name: the second time it succeeds, whatever became of the data."""
    store, syncs = Store(LocalFileSystem(), str(tmp_path), retry=quick()), []

    def fails_once(number: int) -> None:
        syncs.append(number)
        if len(syncs) == at:
            raise OSError(errno.EIO, "injected")

    monkeypatch.setattr(os, "fsync", fails_once)
    with pytest.raises(StorageError, match="was written and could not be made durable"):
        store.write_bytes("a/b", b"weights")
    assert len(syncs) == at
    assert os.listdir(tmp_path / "a") == []
    syncs.clear()
    with pytest.raises(StorageError, match="was written and could not be made durable"):
        store.write_once("a/c.json", b"{}")
    assert len(syncs) == at
