"""Documents outside the store: found by globs, known by what they hold."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from infra.store import Store
from infra.store.inputs import SourceError, list_source, lock, locked_digest
from specs.sources import SourceSpec
from tests.recipes import write_documents


def source(url: object, **fields: object) -> SourceSpec:
    return SourceSpec.model_validate({"url": str(url), "format": "text"} | fields)


def tree(root: Path) -> Path:
    for name in ("a.py", "b.txt", "pkg/c.py", "pkg/test/d.py", "pkg/deep/er/e.py"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(name)
    return root


@pytest.mark.parametrize(
    ("include", "exclude", "expected"),
    [
        (["**/*.py"], [], ["a.py", "pkg/c.py", "pkg/deep/er/e.py", "pkg/test/d.py"]),
        (["**/*.py"], ["**/test/**"], ["a.py", "pkg/c.py", "pkg/deep/er/e.py"]),
        (["*"], [], ["a.py", "b.txt"]),
        (["pkg/*.py"], [], ["pkg/c.py"]),
        (["pkg/**/*.py"], ["pkg/deep/**"], ["pkg/c.py", "pkg/test/d.py"]),
        (["p*/deep/*/e.py"], [], ["pkg/deep/er/e.py"]),
    ],
)
@pytest.mark.parametrize("protocol", ["file", "memory"])
def test_globs(
    tmp_path: Path, protocol: str, include: list[str], exclude: list[str], expected: list[str]
) -> None:
    tree(tmp_path)
    url = str(tmp_path)
    if protocol == "memory":
        import fsspec

        url = f"memory://{tmp_path.name}"
        fsspec.filesystem("memory").put(str(tmp_path), f"/{tmp_path.name}", recursive=True)
    assert [
        file.path for file in list_source(source(url, include=include, exclude=exclude)).files
    ] == expected


def test_the_digest_depends_on_content_and_not_on_place_or_time(tmp_path: Path) -> None:
    one, two = tree(tmp_path / "one"), tree(tmp_path / "elsewhere" / "two")
    os.utime(two / "a.py", (1, 1))
    first, second = list_source(source(one)), list_source(source(two))
    assert first.key != second.key
    assert first.digest() == second.digest()
    (two / "a.py").write_text("b.py")
    assert list_source(source(two)).digest() != first.digest()


def test_a_renamed_file_is_another_input(tmp_path: Path) -> None:
    root = tree(tmp_path)
    before = list_source(source(root)).digest()
    (root / "a.py").rename(root / "z.py")
    assert list_source(source(root)).digest() != before


def test_the_lock_spares_reading_until_the_listing_changes(tmp_path: Path) -> None:
    store, root = Store.open(str(tmp_path / "store")), write_documents(tmp_path / "d", 3)
    listing = list_source(source(root))
    assert locked_digest(store, listing) is None
    lock(store, listing, listing.digest())
    assert locked_digest(store, list_source(source(root))) == listing.digest()
    (root / "note-00.txt").write_text("other")
    assert locked_digest(store, list_source(source(root))) is None


@pytest.mark.parametrize(("url", "fields"), [("/nowhere/at/all", {}), (".", {"include": ["*.nothing"]})])
def test_a_source_without_files_is_an_error_that_names_it(url: str, fields: dict[str, object]) -> None:
    with pytest.raises(SourceError, match=r"nowhere|nothing"):
        list_source(source(url, **fields))


@pytest.mark.parametrize(
    "error", [PermissionError(errno.EACCES, "Permission denied"), OSError(errno.EIO, "Input/output error")]
)
def test_a_subfolder_that_cannot_be_listed_is_an_error_that_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: OSError
) -> None:
    root, scan = tree(tmp_path), os.scandir

    def refuse(path: str) -> Iterator[os.DirEntry[str]]:
        if str(path).endswith("pkg/deep"):
            raise type(error)(error.errno, error.strerror, path)
        return scan(path)

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(SourceError, match=f"cannot list {root}: .*{error.strerror}: '{root}/pkg/deep'"):
        list_source(source(root, include=["**/*.py"]))
    found = list_source(source(root, include=["**/*.py"], exclude=["pkg/deep/**"]))  # nothing in it is wanted
    assert [file.path for file in found.files] == ["a.py", "pkg/c.py", "pkg/test/d.py"]


def test_installed_packages_are_found_without_importing_them() -> None:
    import sys

    files = list_source(source("installed:stdlib", include=["this.py"])).files
    assert [file.path for file in files] == ["this.py"]
    assert "this" not in sys.modules
    with pytest.raises(ValueError, match="no installed package 'not_there'"):
        source("installed:not_there")


def test_a_dataset_of_the_hub_is_listed_like_any_folder_and_locked_by_its_blobs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from huggingface_hub import HfApi, HfFileSystem
    from huggingface_hub.hf_api import RepoFile

    blobs = {"data/train-0.parquet": "a" * 40, "data/train-1.parquet": "b" * 40, "data/README.md": "c" * 40}

    def tree(self: HfApi, repo_id: str, path_in_repo: str | None = None, **options: object) -> list[RepoFile]:
        assert (repo_id, path_in_repo, options["revision"], options["repo_type"]) == (
            "owner/name",
            "data",
            "1f2e3d",
            "dataset",
        )
        return [RepoFile(path=path, size=10, oid=blob) for path, blob in blobs.items()]

    monkeypatch.setattr(HfApi, "repo_info", lambda *args, **options: None)
    monkeypatch.setattr(HfApi, "list_repo_tree", tree)
    url = "hf://datasets/owner/name@1f2e3d/data"

    def listed() -> tuple[list[str], str]:
        HfFileSystem.clear_instance_cache()
        listing = list_source(source(url, format="parquet"))
        return [file.path for file in listing.files], listing.key

    files, key = listed()
    assert files == ["train-0.parquet", "train-1.parquet"]
    assert listed()[1] == key
    blobs["data/train-1.parquet"] = "d" * 40
    assert listed()[1] != key
    HfFileSystem.clear_instance_cache()


def test_a_pipe_among_the_files_of_a_source_is_named_and_not_waited_for(tmp_path: Path) -> None:
    tree(tmp_path)
    (tmp_path / "link.py").symlink_to(tmp_path / "a.py")
    assert "link.py" in [file.path for file in list_source(source(tmp_path, include=["*.py"])).files]
    os.mkfifo(tmp_path / "pipe.py")
    with pytest.raises(
        SourceError, match=r"cannot read '.*/pipe\.py' of .*: it is a named pipe, not a regular file"
    ):
        list_source(source(tmp_path, include=["*.py"]))
    assert len(list_source(source(tmp_path, include=["*.txt"])).files) == 1


@pytest.mark.parametrize("folder", ["", "f\udcfclder"])
def test_a_file_whose_name_is_not_utf_8_is_named_with_its_bytes(tmp_path: Path, folder: str) -> None:
    tree(tmp_path)
    (tmp_path / folder).mkdir(exist_ok=True)
    (tmp_path / folder / "caf\udce9.py").write_text("")
    named = (
        rf"the name of a file of {tmp_path} is not UTF-8: b'.*caf\\xe9\.py'\. Fix: rename it, or exclude it"
    )
    with pytest.raises(SourceError, match=named):
        list_source(source(tmp_path, include=["**/*.py"]))
    assert list_source(source(tmp_path, include=["**/*.py"], exclude=["**/caf*"])).key
