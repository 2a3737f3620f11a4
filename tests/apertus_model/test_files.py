"""Files outside the store, as local ones."""

from __future__ import annotations

from pathlib import Path

import fsspec
import pytest
from fsspec.registry import known_implementations

from apertus_model.files import copy_folder, local_file, read_text
from infra.store.inputs import SourceError


@pytest.fixture
def remote(tmp_path: Path) -> str:
    """A folder of three files that is not on a local filesystem."""
    root = f"/{tmp_path.name}"
    for name, content in (("a.yaml", b"a"), ("b/c.yaml", b"c"), ("b/d.txt", b"d")):
        fsspec.filesystem("memory").pipe_file(f"{root}/{name}", content)
    return f"memory:/{root}"


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_the_files_that_are_chosen_are_copied_at_their_places(remote: str, tmp_path: Path) -> None:
    assert copy_folder(remote, tmp_path / "copy", ["**/*.yaml"]) == tmp_path / "copy"
    assert contents(tmp_path / "copy") == {"a.yaml": b"a", "b/c.yaml": b"c"}


def test_a_folder_without_such_files_is_named(remote: str, tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=remote):
        copy_folder(remote, tmp_path / "copy", ["*.json"])


def test_a_local_file_is_not_copied(tmp_path: Path) -> None:
    (tmp_path / "a.bin").write_bytes(b"a")
    assert local_file(str(tmp_path / "a.bin"), tmp_path / "copy") == tmp_path / "a.bin"
    assert not (tmp_path / "copy").exists()
    with pytest.raises(SourceError, match=f"there is no file {tmp_path}/b.bin"):
        local_file(str(tmp_path / "b.bin"), tmp_path / "copy")


def test_a_remote_file_is_copied_once_and_whole(remote: str, tmp_path: Path) -> None:
    target = tmp_path / "folder" / "a"
    assert local_file(f"{remote}/a.yaml", target) == target
    assert contents(target.parent) == {"a": b"a"}
    target.write_bytes(b"kept")
    assert local_file(f"{remote}/a.yaml", target).read_bytes() == b"kept"
    with pytest.raises(SourceError, match=f"cannot read {remote}/none"):
        local_file(f"{remote}/none", tmp_path / "none")
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize("url", ["unheard://folder/file", "missing-package://file", "installed:unheard/file"])
def test_a_url_that_nothing_here_can_open_is_named(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    filesystem = {"class": "unheard.FileSystem", "err": "install unheard"}
    monkeypatch.setitem(known_implementations, "missing-package", filesystem)
    with pytest.raises(SourceError, match=f"cannot read {url}: "):
        local_file(url, tmp_path / "copy")
    with pytest.raises(SourceError, match=f"cannot read {url}: "):
        read_text(url)
