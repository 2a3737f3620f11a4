"""Files below a folder: folder by folder, or all at once where the storage lists trees."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from fsspec.implementations.local import LocalFileSystem
from fsspec.implementations.memory import MemoryFileSystem

from infra.store.storage.listing import tree


class ListsTrees(MemoryFileSystem):
    """As object storage does: in one request."""

    asked: list[str]

    def find(self, path: str, **options: Any) -> Any:
        self.asked.append(path)
        return super().find(path, **options)

    def ls(self, path: str, **options: Any) -> Any:
        return super().ls(path, **options)


def files(folder: Path) -> Path:
    for name in ("a", "b/c", "b/d/e", "other/f"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("x")
    return folder


def names(found: dict[str, Any], root: str) -> list[str]:
    return sorted(name.removeprefix(f"{root}/") for name in found)


def test_each_folder_is_asked_for_once_and_those_that_are_not_wanted_never(tmp_path: Path) -> None:
    root, asked = str(files(tmp_path)), []

    def call(folder: str, ask: Any) -> Any:
        asked.append(folder)
        return ask()

    found = tree(LocalFileSystem(), root, call=call, enter=lambda folder: not folder.endswith("other"))
    assert names(found, root) == ["a", "b/c", "b/d/e"]
    assert sorted(asked) == [root, f"{root}/b", f"{root}/b/d"]


def test_a_folder_may_be_an_entry_and_is_not_entered(tmp_path: Path) -> None:
    root = str(files(tmp_path))
    found = tree(LocalFileSystem(), root, as_file=lambda folder: folder.endswith("/b"))
    assert names(found, root) == ["a", "b", "other/f"]


def test_a_link_to_a_folder_is_not_followed(tmp_path: Path) -> None:
    root = files(tmp_path / "root")
    os.symlink(tmp_path, root / "up")
    assert names(tree(LocalFileSystem(), str(root)), str(root)) == ["a", "b/c", "b/d/e", "other/f", "up"]


def test_what_is_not_there_has_no_files(tmp_path: Path) -> None:
    assert tree(LocalFileSystem(), str(tmp_path / "none")) == {}


def test_a_folder_that_cannot_be_listed_is_an_error(tmp_path: Path) -> None:
    def call(folder: str, ask: Any) -> Any:
        if folder.endswith("d"):
            raise PermissionError(folder)
        return ask()

    with pytest.raises(PermissionError):
        tree(LocalFileSystem(), str(files(tmp_path)), call=call)


def test_storage_that_lists_trees_is_asked_once() -> None:
    fs = ListsTrees(skip_instance_cache=True)
    fs.store, fs.pseudo_dirs, fs.asked = {}, [""], []
    for name in ("a", "b/c", "b/d/e"):
        fs.pipe_file(f"/root/{name}", b"x")
    assert names(tree(fs, "/root"), "/root") == ["a", "b/c", "b/d/e"]
    assert fs.asked == ["/root"]
