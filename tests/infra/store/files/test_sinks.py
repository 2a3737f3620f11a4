"""Files are written whole or not at all, whatever the storage answers."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest

from infra.store import Artifact, StorageError, Store
from infra.store.files import sinks
from tests.infra.failing import Failing, answer_is_lost, elsewhere, fails_first
from tests.infra.integrity import PART, PIECE, attempt, quick


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of a few hundred kilobytes have many parts."""
    monkeypatch.setattr(sinks, "PART_BYTES", PART)


@pytest.mark.parametrize("method", ["pipe_file", "put_file", "info"])
@pytest.mark.parametrize("fault", [fails_first(2), answer_is_lost])
def test_a_file_is_whole_after_a_fault_while_it_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, small_parts: None, method: str, fault: Callable[..., Any]
) -> None:
    store, data = elsewhere(tmp_path), Random(3).randbytes(50_000)
    store.piece_bytes = PIECE
    Failing(monkeypatch, store.fs, **{method: fault})
    record = store.write_bytes("c/f/attempts/a/x", data)
    assert store.reader("c/f/attempts/a/x", record).bytes() == data


def test_a_collected_file_has_no_name_so_that_it_ends_with_its_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, small_parts: None
) -> None:
    monkeypatch.setenv("APERTUS_SCRATCH", str(scratch := tmp_path / "scratch"))
    scratch.mkdir()
    store = elsewhere(tmp_path)
    store.piece_bytes = PIECE
    put_file, sizes = store.fs.put_file, list[tuple[int, list[str]]]()

    def look(path: str, *arguments: Any, **options: Any) -> Any:
        sizes.append((os.path.getsize(path), os.listdir(scratch)))
        return put_file(path, *arguments, **options)

    monkeypatch.setattr(store.fs, "put_file", look)
    store.write_bytes("c/f/attempts/a/x", bytes(50_000))
    assert sizes == [(50_000, [])]


@pytest.mark.parametrize("method", ["create_multipart_upload", "upload_part", "complete_multipart_upload"])
@pytest.mark.parametrize("fault", [fails_first(2), answer_is_lost])
def test_an_upload_in_parts_survives_a_fault_of_any_request(
    s3: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str, fault: Callable[..., Any]
) -> None:
    opened, data = Store.open(f"{s3}/{tmp_path.name}"), Random(3).randbytes(20 * 2**20)
    store = Store(opened.fs, opened.root, retry=quick())
    call_s3, count = store.fs.call_s3, [0]

    def faulty(name: str, *arguments: Any, **options: Any) -> Any:
        if name != method:
            return call_s3(name, *arguments, **options)
        count[0] += 1
        return fault(count[0], lambda: call_s3(name, *arguments, **options))

    monkeypatch.setattr(store.fs, "call_s3", faulty)
    record = store.write_bytes("c/f/attempts/a/x", data)
    assert store.reader("c/f/attempts/a/x", record).bytes() == data


def test_a_write_that_the_storage_cut_is_an_error_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = elsewhere(tmp_path)
    pipe_file = store.fs.pipe_file
    monkeypatch.setattr(
        store.fs, "pipe_file", lambda path, data, **options: pipe_file(path, data[:-1], **options)
    )
    with pytest.raises(StorageError, match=r"has 2 bytes of 'c/f/attempts/a/x', 3 were written"):
        store.write_bytes("c/f/attempts/a/x", b"abc")
    assert store.names("c/f/attempts/a") == []


@pytest.mark.parametrize("reason", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_a_full_disk_is_reported_at_once_and_damages_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reason: int
) -> None:
    opened = Store.open(str(tmp_path / "store"))
    store = Store(
        opened.fs, opened.root, retry=quick(sleep=lambda seconds: pytest.fail("it was tried again"))
    )
    writing = attempt(store, tmp_path)
    writing.write_bytes("a", b"abc")
    writing.commit(metrics={})
    pwrite = os.pwrite

    def full(number: int, data: bytes, offset: int) -> int:
        if offset + len(data) > 2**20:
            raise OSError(reason, "full")
        return pwrite(number, data, offset)

    monkeypatch.setattr(os, "pwrite", full)
    again = attempt(store, tmp_path, "second", "pretrain/g")
    with pytest.raises(StorageError, match="no space left: writing 'pretrain/g/attempts/second/b'"):
        again.write_bytes("b", bytes(2 * 2**20))
    assert Artifact(store, "pretrain/f").bytes("a") == b"abc"
    assert [name for _, _, names in os.walk(tmp_path / "store" / "pretrain" / "g") for name in names] == []
