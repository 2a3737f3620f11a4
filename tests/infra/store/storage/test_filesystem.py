"""Markers are written once and read whole, also where the storage loses or cuts an answer."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.local import LocalFileSystem

from infra.store import Store
from tests.infra.failing import Failing, answer_is_lost, elsewhere, fails_first
from tests.infra.integrity import attempt, quick


def halves_first(number: int, call: Callable[[], Any]) -> Any:
    data = call()
    return data[: len(data) // 2] if number == 1 else data


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


def test_the_first_of_two_writers_wins_where_the_condition_is_refused_late(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on Swift: the conflict is an error of another name, and the other marker was not there a moment
    before."""
    store = elsewhere(tmp_path)

    def refused(number: int, call: Callable[[], Any]) -> Any:
        store.fs.store[store.full("a.json")] = type(store.fs.open("/x", "wb"))(
            store.fs, store.full("a.json"), b"theirs"
        )
        raise OSError(errno.EINVAL, "precondition")

    Failing(monkeypatch, store.fs, pipe_file=refused)
    assert not store.write_once("a.json", b"ours")
    assert store.read_bytes("a.json") == b"theirs"


def test_a_marker_that_was_torn_by_its_writer_is_completed_and_that_of_another_is_kept(
    tmp_path: Path,
) -> None:
    store = elsewhere(tmp_path)
    store.fs.pipe_file(store.full("a.json"), b'{"attempt": "fir')
    assert store.write_once("a.json", b'{"attempt": "first"}')
    assert store.read_json("a.json") == {"attempt": "first"}
    assert not store.write_once("a.json", b'{"attempt": "second"}')


def test_a_marker_of_which_half_arrives_is_read_again_and_not_called_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = elsewhere(tmp_path)
    Failing(monkeypatch, store.fs, cat_file=halves_first)
    assert store.read_json("format.json") == {"format": 3}


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


def test_committing_and_finding_a_checkpoint_lists_nothing_that_grows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = elsewhere(tmp_path)
    counts = []
    for step in range(1, 6):
        writing = attempt(store, tmp_path, f"a{step}", resume_step=step - 1 or None)
        with store.writer(writing.folder(f"step-{step:08d}/w")) as writer:
            writer.write(b"weights")
        writing.add_metrics({"step": step})
        with monkeypatch.context() as patch:
            calls = Failing(
                patch,
                store.fs,
                **dict.fromkeys(("ls", "find", "walk", "cat_file", "pipe_file"), fails_first(0)),
            ).calls
            writing.commit_checkpoint(step, {}, files={"w": writer.record})
            newest = writing.artifact.checkpoint(writing.artifact.checkpoint_steps()[-1])
        assert newest.step == step
        counts.append({name: calls.count(name) for name in calls})
    assert counts[0] == counts[-1] == {"pipe_file": 2, "cat_file": 4, "ls": 1}
