"""Storage that fails, stalls, cuts, loses its answers or is full: every call is met with another try, or told; nothing is damaged."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import fsspec
import pytest
from fsspec.implementations.local import LocalFileSystem

from infra.store import Artifact, StorageError, Store
from infra.store.files import sinks
from infra.store.storage.retry import is_transient
from tests.infra.integrity import PART, PIECE, attempt, bucket, quick


@pytest.fixture(scope="module")
def s3() -> Iterator[str]:
    """URL of a bucket."""
    yield from bucket()


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of a few hundred kilobytes have many parts."""
    monkeypatch.setattr(sinks, "PART_BYTES", PART)


class Failing:
    """Makes chosen methods of a filesystem go wrong: before they did their work, after it, or by what they give."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, fs: Any, **faults: Callable[..., Any]) -> None:
        self.calls: list[str] = []
        for name, fault in faults.items():
            monkeypatch.setattr(fs, name, self._wrapped(name, getattr(fs, name), fault))

    def _wrapped(self, name: str, method: Callable[..., Any], fault: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            self.calls.append(name)
            return fault(self.calls.count(name), lambda: method(*arguments, **options))

        return call


def fails_first(times: int, error: Exception | None = None) -> Callable[[int, Callable[[], Any]], Any]:
    def fault(number: int, call: Callable[[], Any]) -> Any:
        if number <= times:
            raise error or OSError(errno.EIO, "injected")
        return call()

    return fault


def answer_is_lost(number: int, call: Callable[[], Any]) -> Any:
    result = call()
    if number == 1:
        raise TimeoutError("injected")
    return result


def halves_first(number: int, call: Callable[[], Any]) -> Any:
    data = call()
    return data[: len(data) // 2] if number == 1 else data


def elsewhere(tmp_path: Path, **options: Any) -> Store:
    store = Store(fsspec.filesystem("memory", skip_instance_cache=True), f"/{tmp_path.name}", retry=quick(**options))
    store.initialise()
    return store


@pytest.mark.parametrize("method", ["info", "cat_file", "pipe_file", "ls", "rm"])
@pytest.mark.parametrize("error", [OSError(errno.EIO, "x"), TimeoutError(), ConnectionResetError(), OSError(errno.EBUSY, "SlowDown")])
def test_an_error_of_the_storage_is_met_with_another_try(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str, error: Exception
) -> None:
    store = elsewhere(tmp_path)
    Failing(monkeypatch, store.fs, **{method: fails_first(6, error)})
    assert store.write_once("a/b.json", b'{"x": 1}')
    assert store.names("a") == ["b.json"]
    assert store.exists("a/b.json")
    assert not store.exists("a/c.json")
    assert store.read_json("a/b.json") == {"x": 1}
    store.remove("a/b.json")
    assert store.read_if_there("a/b.json") is None


def test_an_error_that_lasts_is_told_with_what_was_tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []
    store = elsewhere(tmp_path, sleep=pauses.append, chance=lambda: 1.0)
    Failing(monkeypatch, store.fs, info=fails_first(99))
    with pytest.raises(StorageError, match=r"failed 7 times: looking for 'a' in the store memory://.*OSError: \[Errno 5\] injected"):
        store.exists("a")
    assert pauses == [0.5, 1.0, 2.0, 4.0, 8.0, 15.0]


@pytest.mark.parametrize("error", [PermissionError("no"), FileNotFoundError("none"), OSError(errno.ENOSPC, "full"), ValueError("ours")])
def test_what_no_other_try_can_mend_is_told_at_once(error: Exception) -> None:
    tries = []

    def call() -> None:
        tries.append(1)
        raise error

    with pytest.raises((StorageError, type(error))):
        quick().call("x", call)
    assert tries == [1]


def test_errors_of_the_s3_client_that_are_no_os_errors_are_known() -> None:
    from botocore import exceptions

    assert is_transient(exceptions.ReadTimeoutError(endpoint_url="http://x"))
    assert is_transient(exceptions.EndpointConnectionError(endpoint_url="http://x"))
    assert not is_transient(exceptions.NoCredentialsError())


def test_a_call_that_stalls_is_given_up_and_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, released = elsewhere(tmp_path, stall=0.05), threading.Event()

    def stalls(number: int, call: Callable[[], Any]) -> Any:
        if number == 1:
            released.wait(20)
        return call()

    Failing(monkeypatch, store.fs, cat_file=stalls)
    begin = time.monotonic()
    assert store.read_json("format.json") == {"format": 3}
    assert time.monotonic() - begin < 5
    released.set()


def test_a_marker_whose_answer_was_lost_is_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = elsewhere(tmp_path)
    Failing(monkeypatch, store.fs, pipe_file=answer_is_lost)
    assert store.write_once("a/b.json", b"ours")
    assert not store.write_once("a/b.json", b"theirs")
    assert store.read_bytes("a/b.json") == b"ours"


def test_a_link_whose_answer_was_lost_is_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, link, links = Store(LocalFileSystem(), str(tmp_path), retry=quick()), os.link, []

    def lost(source: Any, target: Any) -> None:
        link(source, target)
        links.append(target)
        if len(links) == 1:
            raise OSError(errno.EIO, "injected")

    monkeypatch.setattr(os, "link", lost)
    assert store.write_once("a/b.json", b"ours")
    assert not store.write_once("a/b.json", b"ours")


@pytest.mark.parametrize("at", [1, 2])
def test_a_sync_that_fails_is_no_second_time_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: int) -> None:
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


def test_the_first_of_two_writers_wins_where_the_condition_is_refused_late(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on Swift: the conflict is an error of another name, and the other marker was not there a moment before."""
    store = elsewhere(tmp_path)

    def refused(number: int, call: Callable[[], Any]) -> Any:
        store.fs.store[store.full("a.json")] = type(store.fs.open("/x", "wb"))(store.fs, store.full("a.json"), b"theirs")
        raise OSError(errno.EINVAL, "precondition")

    Failing(monkeypatch, store.fs, pipe_file=refused)
    assert not store.write_once("a.json", b"ours")
    assert store.read_bytes("a.json") == b"theirs"


def test_a_marker_that_was_torn_by_its_writer_is_completed_and_that_of_another_is_kept(tmp_path: Path) -> None:
    store = elsewhere(tmp_path)
    store.fs.pipe_file(store.full("a.json"), b'{"attempt": "fir')
    assert store.write_once("a.json", b'{"attempt": "first"}')
    assert store.read_json("a.json") == {"attempt": "first"}
    assert not store.write_once("a.json", b'{"attempt": "second"}')


def test_a_marker_of_which_half_arrives_is_read_again_and_not_called_damaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = elsewhere(tmp_path)
    Failing(monkeypatch, store.fs, cat_file=halves_first)
    assert store.read_json("format.json") == {"format": 3}


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


def test_a_write_that_the_storage_cut_is_an_error_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = elsewhere(tmp_path)
    pipe_file = store.fs.pipe_file
    monkeypatch.setattr(store.fs, "pipe_file", lambda path, data, **options: pipe_file(path, data[:-1], **options))
    with pytest.raises(StorageError, match=r"has 2 bytes of 'c/f/attempts/a/x', 3 were written"):
        store.write_bytes("c/f/attempts/a/x", b"abc")
    assert store.names("c/f/attempts/a") == []


@pytest.mark.parametrize("reason", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_a_full_disk_is_told_at_once_and_damages_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reason: int) -> None:
    opened = Store.open(str(tmp_path / "store"))
    store = Store(opened.fs, opened.root, retry=quick(sleep=lambda seconds: pytest.fail("it was tried again")))
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


def test_what_another_client_wrote_or_removed_is_seen_at_once(s3: str, tmp_path: Path) -> None:
    fs = fsspec.get_filesystem_class("s3")
    one = Store(fs(skip_instance_cache=True), f"bucket/{tmp_path.name}")  # with s3fs's cache of listings
    other = Store(fs(skip_instance_cache=True), f"bucket/{tmp_path.name}")
    assert (one.names("a"), one.exists("a/x.json")) == ([], False)
    one.fs.ls(f"bucket/{tmp_path.name}") if one.fs.exists(f"bucket/{tmp_path.name}") else None
    other.write_once("a/x.json", b"1")
    one.fs.find(f"bucket/{tmp_path.name}")
    assert (one.names("a"), one.exists("a/x.json")) == (["x.json"], True)
    other.remove("a/x.json")
    assert (one.names("a"), one.exists("a/x.json")) == ([], False)


def test_the_environment_sets_what_an_s3_store_waits_for(s3: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert Store.open(f"{s3}/x").fs.config_kwargs["read_timeout"] == 30
    monkeypatch.setitem(fsspec.config.conf, "s3", {"config_kwargs": '{"read_timeout": 7}', "max_concurrency": 3})
    fs = Store.open(f"{s3}/x").fs
    assert (fs.config_kwargs["read_timeout"], fs.config_kwargs["connect_timeout"], fs.max_concurrency) == (7, 10, 3)


def test_committing_and_finding_a_checkpoint_lists_nothing_that_grows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = elsewhere(tmp_path)
    counts = []
    for step in range(1, 6):
        writing = attempt(store, tmp_path, f"a{step}", resume_step=step - 1 or None)
        with store.writer(writing.folder(f"step-{step:08d}/w")) as writer:
            writer.write(b"weights")
        writing.add_metrics({"step": step})
        with monkeypatch.context() as patch:
            calls = Failing(patch, store.fs, **dict.fromkeys(("ls", "find", "walk", "cat_file", "pipe_file"), fails_first(0))).calls
            writing.commit_checkpoint(step, {}, files={"w": writer.record})
            newest = writing.artifact.checkpoint(writing.artifact.checkpoint_steps()[-1])
        assert newest.step == step
        counts.append({name: calls.count(name) for name in calls})
    assert counts[0] == counts[-1] == {"pipe_file": 2, "cat_file": 4, "ls": 1}
