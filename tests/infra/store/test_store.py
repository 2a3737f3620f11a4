"""The store: write-once markers, nothing outside the root, nothing read that no marker names, damage
noticed."""

from __future__ import annotations

import os
from pathlib import Path

import fsspec
import pytest

from infra.store import Store, StoreError
from tests.infra.store.racing import winners


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
def test_a_store_of_another_format_is_refused_with_its_name_and_what_to_do(
    tmp_path: Path, document: str, message: str
) -> None:
    (tmp_path / "format.json").write_text(document)
    with pytest.raises(StoreError) as refused:
        Store.open(str(tmp_path))
    new = "use a new store (--store)"
    upgrade = "use a newer release of this program, or a new store (--store)"
    assert str(refused.value) == f"the store '{tmp_path}' {message.format(new=new, upgrade=upgrade)}"
    assert os.listdir(tmp_path) == ["format.json"] and (tmp_path / "format.json").read_text() == document


def test_the_store_knows_its_own_url(tmp_path: Path) -> None:
    assert Store.open(f"file://{tmp_path}/s").url == str(tmp_path / "s")
    assert Store.open("memory://bucket/s").url == "memory:///bucket/s"
    assert isinstance(Store.open("memory://bucket/s").fs, fsspec.get_filesystem_class("memory"))


def test_an_unknown_protocol_is_a_message() -> None:
    with pytest.raises(StoreError, match="cannot open the store"):
        Store.open("nonsense://bucket")
