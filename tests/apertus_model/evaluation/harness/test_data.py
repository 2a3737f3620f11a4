from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import fsspec
import pyarrow
import pyarrow.parquet
import pytest

from apertus_model.evaluation.harness.data import Snapshot, Snapshots, local_snapshots, snapshot_source
from apertus_model.evaluation.harness.needs import Reads
from apertus_model.evaluation.harness.tasks import HarnessError
from infra.store.inputs import list_source
from tests.apertus_model.evaluation.task_data import ARC, write_arc, write_dataset, write_jsonl
from tests.infra.integrity import bucket
from tests.machine import slow

datasets = pytest.importorskip("datasets", reason="the extra `harness` is not installed")


def snapshot(folder: Path, name: str) -> Snapshot:
    return Snapshot(list_source(snapshot_source(str(folder), name)))


def load(folder: Path, scratch: Path, path: str, name: str | None = None, **arguments: Any) -> Any:
    with Snapshots(folder, scratch).in_place():
        return datasets.load_dataset(path, name, **arguments)


def write_converted(folder: Path) -> None:
    """A data set as the Hub converts one: a folder for each subset, and no card."""
    for subset in ("one", "two"):
        for split in ("train", "test"):
            path = folder / "x" / "y" / subset / split / "0000.parquet"
            path.parent.mkdir(parents=True)
            pyarrow.parquet.write_table(pyarrow.table({"a": [f"{subset} {split}"]}), path)


def test_a_subset_is_found_by_the_card(tmp_path: Path) -> None:
    write_arc(tmp_path / "d")
    found = load(tmp_path / "d", tmp_path / "s", ARC, "ARC-Easy", revision="abc", trust_remote_code=True)
    assert {split: len(rows) for split, rows in found.items()} == {"train": 5, "validation": 2, "test": 6}
    assert found["test"][1]["answerKey"] == "B"
    here = snapshot(tmp_path / "d", ARC)
    assert all(".cache" not in file.path for file in here.listing.files)
    assert here.missing(Reads(ARC, "ARC-Easy", ("test", "train"), (), ("question",))) is None


def test_a_subset_of_converted_data_is_a_folder(tmp_path: Path) -> None:
    write_converted(tmp_path / "d")
    found = load(tmp_path / "d", tmp_path / "s", "x/y", "two")
    assert {split: rows["a"][:] for split, rows in found.items()} == {
        "train": ["two train"],
        "test": ["two test"],
    }
    assert snapshot(tmp_path / "d", "x/y").missing(Reads("x/y", "one", ("test",), (), ("a",))) is None


def test_plain_files_are_splits_by_their_names(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "d" / "x" / "y" / "train.jsonl", [{"q": "a"}])
    write_jsonl(tmp_path / "d" / "x" / "y" / "test.jsonl", [{"q": "b"}, {"q": "c"}])
    assert load(tmp_path / "d", tmp_path / "s", "x/y")["test"]["q"][:] == ["b", "c"]
    named = load(tmp_path / "d", tmp_path / "s", "x/y", data_files={"mine": "train.jsonl"})
    assert list(named) == ["mine"]
    here = snapshot(tmp_path / "d", "x/y")
    assert here.missing(Reads("x/y", None, ("test",), (), ("q",))) is None
    assert here.missing(Reads("x/y", None, ("test",), (), ("q", "z"))) == (
        "no column z in split test; it has q"
    )


@pytest.mark.parametrize(
    ("reads", "message"),
    [
        (Reads(ARC, "ARC-Hard", ("test",)), "no subset ARC-Hard: .*ARC-Easy"),
        (Reads(ARC, "ARC-Easy", ("dev",)), "no split dev of subset ARC-Easy; it has train, validation, test"),
        (
            Reads(ARC, "ARC-Easy", ("test",), (), ("question", "hint")),
            "no column hint in split test of subset ARC-Easy; it has id, question, choices, answerKey",
        ),
        (Reads(ARC, arguments=(("file", f"{ARC}/x.json"),)), "there is no file x.json"),
    ],
)
def test_what_is_missing_is_named(tmp_path: Path, reads: Reads, message: str) -> None:
    write_arc(tmp_path)
    found = snapshot(tmp_path, ARC).missing(reads)
    assert found is not None and re.match(message, found), found


def test_code_of_a_data_set_is_never_run(tmp_path: Path) -> None:
    marker = tmp_path / "ran"
    script = f"open({str(marker)!r}, 'w')\n"
    folder = tmp_path / "d" / "x" / "y"
    folder.mkdir(parents=True)
    (folder / "y.py").write_text(script)
    with pytest.raises(HarnessError, match="the data set x/y cannot be read"):
        load(tmp_path / "d", tmp_path / "s", "x/y", trust_remote_code=True)
    missing = snapshot(tmp_path / "d", "x/y").missing(Reads("x/y", None, ("test",)))
    assert missing == "it has the loading script y.py in place of data, and no code is run"
    write_arc(tmp_path / "d")
    (tmp_path / "d" / ARC / "ai2_arc.py").write_text(script)  # left beside the data
    assert len(load(tmp_path / "d", tmp_path / "s2", ARC, "ARC-Easy")["test"]) == 6
    assert not marker.exists()


def test_a_data_set_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(HarnessError, match=r"the data set a/b is not in .*"):
        load(tmp_path, tmp_path / "s", "a/b")
    write_dataset(tmp_path, "a/b", {"c": {"test": [{"q": 1}]}})
    with pytest.raises(HarnessError, match="the data set a/b, subset z, cannot be read"):
        load(tmp_path, tmp_path / "s", "a/b", "z")


def test_files_of_the_web_are_read_beside_the_data_sets(tmp_path: Path) -> None:
    import requests

    file = tmp_path / "d" / "example.org" / "x.json"
    write_jsonl(file, [{"a": 1}])
    write_jsonl(tmp_path / "d" / "o" / "n" / "rows.jsonl", [{"a": 2}])
    with Snapshots(tmp_path / "d", tmp_path / "s").in_place():
        answer = requests.get("https://example.org/x.json", timeout=1)
        answer.raise_for_status()
        assert answer.json() == {"a": 1} and json.loads(answer.text) == {"a": 1}
        with pytest.raises(HarnessError, match=r"the file https://example.org/y.json is not at .*"):
            requests.get("https://example.org/y.json", timeout=1)
        url = "https://huggingface.co/datasets/o/n/resolve/main/rows.jsonl"
        found = datasets.load_dataset("json", data_files={"test": url})
        assert found["test"]["a"][:] == [2]


@pytest.fixture
def remote(request: pytest.FixtureRequest) -> Iterator[str]:
    """URL of an empty folder in memory, or of a bucket."""
    if request.param == "s3":
        yield from bucket()
        return
    yield "memory://tasks-test"
    fsspec.filesystem("memory").rm("/tasks-test", recursive=True)


@pytest.mark.parametrize("remote", ["memory", slow("s3")], indirect=True)
def test_remote_data_sets_are_copied(tmp_path: Path, remote: str) -> None:
    write_arc(tmp_path)
    assert local_snapshots(str(tmp_path), [ARC], tmp_path / "s") == tmp_path
    fs, root = fsspec.core.url_to_fs(remote)
    for path in (path for path in (tmp_path / ARC).rglob("*") if path.is_file()):
        fs.pipe_file(f"{root}/{path.relative_to(tmp_path).as_posix()}", path.read_bytes())
    copied = local_snapshots(remote, [ARC], tmp_path / "s")
    assert len(load(copied, tmp_path / "v", ARC, "ARC-Easy")["test"]) == 6
    here, there = (list_source(snapshot_source(folder, ARC)) for folder in (str(tmp_path), remote))
    assert [(one.path, one.size) for one in here.files] == [(one.path, one.size) for one in there.files]
    asked = Reads(ARC, "ARC-Easy", ("test",), (), ("question",))
    assert Snapshot(there).missing(asked) is None
    assert "no column hint" in str(Snapshot(there).missing(replace(asked, columns=("hint",))))
