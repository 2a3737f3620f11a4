"""Copies of files of a remote store: what is given out is what the marker states, whoever else was in the
folder."""

from __future__ import annotations

import hashlib
import os
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random
from typing import Any

import pytest

from infra.store import Store, StoreError
from infra.store.files.reader import CheckedFile
from infra.store.reading.artifact import local_file

DATA = Random(7).randbytes(1000)


@pytest.fixture
def stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CheckedFile:
    monkeypatch.setenv("APERTUS_CACHE", str(tmp_path / "cache"))
    store = Store.open(f"memory://{tmp_path.name}")
    return store.reader("a.bin", store.write_bytes("a.bin", DATA))


@pytest.mark.parametrize("found", [b"?" * 1000, DATA[:-1]])
def test_a_copy_with_another_content_is_made_again(stored: CheckedFile, tmp_path: Path, found: bytes) -> None:
    place = tmp_path / "cache" / hashlib.sha256(DATA).hexdigest() / "a.bin"
    place.parent.mkdir(parents=True)
    place.write_bytes(found)
    assert local_file(stored) == place
    assert place.read_bytes() == DATA
    place.write_bytes(found)
    os.utime(place, (1, 1))  # a clock may not have moved since
    assert local_file(stored).read_bytes() == DATA


def test_a_copy_is_compared_once_per_process(
    stored: CheckedFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compared, file_digest = [], hashlib.file_digest

    def counted(file: Any, name: str) -> Any:
        compared.append(file.name)
        return file_digest(file, name)

    monkeypatch.setattr(hashlib, "file_digest", counted)
    place = tmp_path / "cache" / hashlib.sha256(DATA).hexdigest() / "a.bin"
    place.parent.mkdir(parents=True)
    place.write_bytes(DATA)
    for _ in range(3):
        local_file(stored)
    assert compared == [str(place)]


def test_threads_that_want_the_same_copy_do_not_meet(
    stored: CheckedFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    download, together = CheckedFile.download, threading.Barrier(2)

    def slow(file: CheckedFile, target: Path) -> None:
        download(file, target)
        together.wait(10)

    monkeypatch.setattr(CheckedFile, "download", slow)
    with ThreadPoolExecutor(2) as threads:
        copies = [*threads.map(local_file, [stored] * 2)]
    assert copies[0] == copies[1]
    assert os.listdir(copies[0].parent) == ["a.bin"]


@pytest.mark.parametrize(("mode", "stranger"), [(0o777, False), (0o770, False), (0o755, True)])
def test_a_folder_that_others_can_write_is_refused(
    stored: CheckedFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: int, stranger: bool
) -> None:
    folder, me = tmp_path / "cache", os.getuid()
    folder.mkdir()
    folder.chmod(mode)
    monkeypatch.setattr(os, "getuid", lambda: me + stranger)
    with pytest.raises(
        StoreError,
        match=rf"belongs to user {me} and has mode {mode:o}; it must belong to user {me + stranger}",
    ):
        local_file(stored)
    assert os.listdir(folder) == []


def test_the_folder_in_the_temporary_one_is_made_for_this_user_alone(
    stored: CheckedFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("APERTUS_CACHE")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    place = tmp_path / f"apertus-cache-{os.getuid()}"
    assert local_file(stored).is_relative_to(place)
    assert place.stat().st_mode & 0o777 == 0o700
    place.rename(tmp_path / "elsewhere")
    place.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(StoreError, match="or set APERTUS_CACHE to another folder"):
        local_file(stored)


@pytest.mark.parametrize("form", ["{}", "{}/below"])
def test_a_cache_folder_that_is_a_file_is_named_with_the_variable(
    stored: CheckedFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("APERTUS_CACHE", form.format(tmp_path / "file"))
    with pytest.raises(StoreError, match=r"file.*Fix: set APERTUS_CACHE to a folder in which you can write"):
        local_file(stored)
