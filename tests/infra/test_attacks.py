"""Data that try to run code, or to be read from elsewhere: each is refused, and what it would have done
has not happened."""

from __future__ import annotations

import json
import os
import pickle
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp

from apertus_model.trainer.checkpoint import load_tensors
from apertus_model.trainer.checkpoint_reader import CheckpointError
from apertus_model.trainer.checkpoint_writer import CheckpointWriter
from infra.store import Artifact, Attempt, Store, StoreError
from infra.store.documents import to_json
from specs.document import parse
from specs.errors import SpecError
from tests.apertus_model.trainer.checkpoints import LocalCheckpoint
from tests.infra.hostile import Calls, edit
from tests.infra.sealed import sealed
from tests.infra.store.attempts import attempt, save


@pytest.fixture
def store(tmp_path: Path) -> Store:
    opened = Store.open(str(tmp_path / "store"))
    opened.initialise()
    return opened


# Checkpoints: an index in JSON, and safetensors


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    writer = CheckpointWriter(Store.open(str(tmp_path)), "checkpoint")
    dcp.save({"weight": torch.arange(3.0), "step": torch.tensor(7)}, storage_writer=writer, no_dist=True)
    return tmp_path / "checkpoint"


def loads(checkpoint: Path) -> None:
    load_tensors({"weight": torch.empty(3)}, LocalCheckpoint(checkpoint))


@pytest.mark.parametrize("file", ["index.json", "rank-00000.safetensors"])
@pytest.mark.parametrize("written_by", ["torch", "pickle"])
def test_a_program_in_place_of_a_file_of_a_checkpoint_does_not_run(
    checkpoint: Path, planted: Path, file: str, written_by: str
) -> None:
    program = Calls(os.system, f"touch {planted}")
    if written_by == "torch":
        torch.save(program, checkpoint / file)
    else:
        (checkpoint / file).write_bytes(pickle.dumps(program))
    with pytest.raises(CheckpointError, match="is damaged"):
        loads(checkpoint)
    assert not planted.exists()


def part(**changes: Any) -> dict[str, Any]:
    return {"file": "rank-00000.safetensors", "offsets": [0], "shape": [3]} | changes


def with_index(checkpoint: Path, **changes: Any) -> None:
    edit(
        checkpoint,
        "index.json",
        tensors={"weight": {"dtype": "F32", "shape": [3], "parts": [part()]} | changes},
    )


@pytest.mark.parametrize("name", ["../secret", "/etc/passwd", "a/b", "..", "a\0", "", 7])
def test_the_index_names_files_beside_it_only(checkpoint: Path, name: Any) -> None:
    with_index(checkpoint)
    loads(checkpoint)
    with_index(checkpoint, parts=[part(file=name)])
    with pytest.raises(CheckpointError, match=r"parts\[0\]\.file is"):
        loads(checkpoint)


@pytest.mark.parametrize(
    ("shape", "parts"),
    [
        ([2**62, 2**62], [part(offsets=[0, 0], shape=[2**62, 2**62])]),
        ([-3], [part()]),
        ([3], []),
        ([3], [part(shape=[2])]),
        ([3], [part(offsets=[1])]),
        ([3], [part(offsets=[-1])]),
        ([3], [part(shape=[3, 1])]),
        ([3], [part(), part()]),
        ([3], [part(shape=[0]), part(offsets=[0.0])]),
        ([4], [part(shape=[4])]),
    ],
)
def test_parts_that_are_not_those_of_the_tensor_are_refused(
    checkpoint: Path, shape: list[Any], parts: list[Any]
) -> None:
    with_index(checkpoint)
    loads(checkpoint)
    with_index(checkpoint, shape=shape, parts=parts)
    with pytest.raises(CheckpointError):
        loads(checkpoint)


@pytest.mark.parametrize("dtype", ["F64", "I32", "F16", "O", 7, None])
def test_a_type_that_is_not_that_of_the_file_is_refused(checkpoint: Path, dtype: Any) -> None:
    with_index(checkpoint)
    loads(checkpoint)
    with_index(checkpoint, dtype=dtype)
    with pytest.raises(CheckpointError, match="is damaged"):
        loads(checkpoint)


def with_header(checkpoint: Path, header: Any, length: int | None = None) -> None:
    data = header if isinstance(header, bytes) else json.dumps(header).encode()
    stated = len(data) if length is None else length
    (checkpoint / "rank-00000.safetensors").write_bytes(stated.to_bytes(8, "little") + data + bytes(20))


def entry(**changes: Any) -> dict[str, Any]:
    return {"weight": {"dtype": "F32", "shape": [3], "data_offsets": [8, 20]} | changes}


@pytest.mark.parametrize(
    "header",
    [
        {},
        [],
        b"",
        b"{" * 1000,
        b'{"weight": {"dtype": "F32", "shape": [3], "data_offsets": [8, 20]}, "weight": 0}',
        entry(data_offsets=[12, 24]),
        entry(data_offsets=[-12, 0]),
        entry(data_offsets=[20, 8]),
        entry(data_offsets=[8, 12]),
        entry(data_offsets=[8, 20, 20]),
        entry(data_offsets=[2**70, 2**70 + 12]),
        entry(shape=[2**62]),
        entry(shape=[3, 1]),
        entry(dtype="F64"),
        entry(dtype="O"),
    ],
)
def test_the_header_of_a_file_leads_to_no_other_bytes(checkpoint: Path, header: Any) -> None:
    with_header(checkpoint, entry())
    loads(checkpoint)
    with_header(checkpoint, header)
    with pytest.raises(CheckpointError, match="is damaged"):
        loads(checkpoint)


@pytest.mark.parametrize("length", [0, 1, 2**16, 2**40, 2**64 - 1])
def test_the_length_of_a_header_asks_for_no_more_memory_than_the_file_has_bytes(
    checkpoint: Path, length: int
) -> None:
    with_header(checkpoint, entry(), length)
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointError, match="is damaged"):
            loads(checkpoint)
        assert tracemalloc.get_traced_memory()[1] < 2**24
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("name", ["index.json", "rank-00000.safetensors"])
def test_a_file_of_a_committed_checkpoint_is_no_link(store: Store, tmp_path: Path, name: str) -> None:
    writing = attempt(store, tmp_path, path="pretrain/f")
    writer = CheckpointWriter(store, writing.folder(writing.checkpoint_folder(7)))
    dcp.save({"weight": torch.arange(3.0)}, storage_writer=writer, no_dist=True)
    committed = writing.commit_checkpoint(7, {}, files=writer.records)
    stored = Path(store.full(f"{committed.folder}/{name}"))
    os.rename(stored, tmp_path / "elsewhere")
    stored.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match="leads out of the store through a link"):
        load_tensors({"weight": torch.empty(3)}, committed)


# Markers and manifests

ESCAPES = ["../../../secret", "..", "a/../../../../secret", "x\0y", "x\\..\\y"]


@pytest.mark.parametrize("escape", ESCAPES)
@pytest.mark.parametrize("field", ["attempt", "folder"])
def test_the_marker_of_a_checkpoint_leads_nowhere_else(
    store: Store, tmp_path: Path, field: str, escape: str
) -> None:
    writing = attempt(store, tmp_path, path="pretrain/f")
    save(writing, 10)
    marker = json.loads(to_json(writing.commit_checkpoint(10, {}, files=sealed(writing, 10)).marker)) | {
        field: escape
    }
    store.remove("pretrain/f/checkpoints/00000010.json")
    store.write_once("pretrain/f/checkpoints/00000010.json", to_json(marker))
    with pytest.raises(StoreError):
        writing.artifact.checkpoint(10)


@pytest.mark.parametrize("escape", ESCAPES)
@pytest.mark.parametrize("change", [{"attempt": 0}, {"files": 0}], ids=["attempt", "file"])
def test_a_manifest_leads_nowhere_else(
    store: Store, tmp_path: Path, change: dict[str, Any], escape: str
) -> None:
    writing = attempt(store, tmp_path)
    writing.write_bytes("data.bin", b"abc")
    writing.commit(metrics={})
    path = writing.artifact.manifest_path
    manifest = store.read_json(path)
    if "attempt" in change:
        manifest["attempt"] = escape
    else:
        manifest["files"] = {escape: manifest["files"]["data.bin"]}
    store.remove(path)
    store.write_once(path, to_json(manifest))
    read = Artifact(store, writing.job.path)
    for use in (read.bytes, read.local):
        with pytest.raises(StoreError, match="not a path inside the store"):
            use(escape if "files" in change else "data.bin")


@pytest.mark.parametrize("escape", ESCAPES)
def test_the_history_leads_nowhere_else(store: Store, tmp_path: Path, escape: str) -> None:
    writing = attempt(store, tmp_path, path="pretrain/f")
    save(writing, 10)
    writing.add_metrics({"step": 10})
    marker = json.loads(to_json(writing.commit_checkpoint(10, {}, files=sealed(writing, 10)).marker))
    marker["history"][0]["path"] = escape
    store.remove("pretrain/f/checkpoints/00000010.json")
    store.write_once("pretrain/f/checkpoints/00000010.json", to_json(marker))
    with pytest.raises(StoreError, match="not a path inside the store"):
        writing.artifact.checkpoint(10)


@pytest.mark.parametrize("path", ["../../outside", "/etc", "pretrain/../../outside"])
def test_an_artifact_whose_path_leaves_the_store_is_refused(store: Store, path: str) -> None:
    with pytest.raises(StoreError, match="not a path inside the store"):
        _ = Artifact(store, path).manifest


def test_a_stored_file_that_is_a_link_out_of_the_store_is_not_read(store: Store, tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(b"abc")
    writing = attempt(store, tmp_path)
    writing.write_bytes("data.bin", b"abc")
    writing.commit(metrics={})
    stored = Path(store.full(writing.folder("data.bin")))
    stored.unlink()
    stored.symlink_to(tmp_path / "secret")
    with pytest.raises(StoreError, match="through a link"):
        Artifact(store, writing.job.path).bytes("data.bin")


def test_a_unit_key_leads_nowhere_else(store: Store, tmp_path: Path) -> None:
    writing: Attempt = attempt(store, tmp_path)
    with pytest.raises(StoreError, match="not a path inside the store"):
        writing.unit("../../x")


# YAML


@pytest.mark.parametrize(
    "value",
    [
        "!!python/object/apply:os.system ['touch {planted}']",
        "!!python/object/new:subprocess.Popen [['touch', '{planted}']]",
        "!!python/name:os.system",
        "!!python/module:antigravity",
        "!include {planted}",
    ],
)
def test_a_tag_of_a_recipe_makes_no_object(planted: Path, value: str) -> None:
    try:
        data = parse(f"name: x\nstages: {value.format(planted=planted)}\n", "recipe.yaml").data
    except SpecError:
        data = {}
    assert not planted.exists()
    assert all(isinstance(found, (str, list, dict, type(None))) for found in data.values())


# Arrays


def test_an_array_of_objects_is_refused(tmp_path: Path, planted: Path) -> None:
    from apertus_model.data.tokens.packing import load_array

    np.save(tmp_path / "evil.npy", np.array([Calls(os.system, f"touch {planted}")], dtype=object))
    with pytest.raises(ValueError, match=r"(?i)object|python"):
        load_array(tmp_path / "evil.npy")
    assert not planted.exists()
