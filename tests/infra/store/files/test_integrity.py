"""What is written is what is read, on any storage: digests of files and of their pieces, and names that
lead nowhere else."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random
from typing import Any

import pytest

from infra.store import Artifact, DamagedError, Store, StoreError
from infra.store.documents import to_json
from infra.store.records import sidecar_path
from tests.infra.integrity import PIECE, attempt


@pytest.mark.parametrize("damage", ["flipped", "shorter", "longer", "gone", "digests"])
def test_a_checkpoint_that_was_altered_is_refused(store: Store, tmp_path: Path, damage: str) -> None:
    writing, data = attempt(store, tmp_path), Random(2).randbytes(20 * PIECE)
    name = writing.folder("step-00000010/__0_0.distcp")
    with store.writer(name) as writer:
        writer.write(data)
    checkpoint = writing.commit_checkpoint(10, {"tokens": 1}, files={"__0_0.distcp": writer.record})
    checkpoint.check()
    assert checkpoint.files == {"__0_0.distcp": writer.record}
    altered = bytearray(data)
    altered[5000] ^= 4
    changes = {"flipped": bytes(altered), "shorter": data[:-1], "longer": data + b"1"}
    if damage == "gone":
        store.fs.rm(store.full(name))
    elif damage == "digests":
        store.fs.pipe_file(store.full(sidecar_path(name)), b"1" * 20 * 32)
    else:
        store.fs.pipe_file(store.full(name), changes[damage])
    messages = {
        "flipped": r"piece 4 of 20 \(bytes 4096 to 5120\)",
        "shorter": "20479 bytes",
        "longer": "20481 bytes",
        "gone": "missing",
    }
    with pytest.raises(DamagedError, match=messages.get(damage, r"\.pieces' is damaged")):
        checkpoint.check()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *[
            (field, value)
            for field in ("attempt", "folder")
            for value in ("..", "../../x", "/etc", "a/../..", "a\\b", "a\0", "", 7)
        ],
        *[
            ("files", {name: {"size": 1, "sha256": "0" * 64}})
            for name in ("../x", "/etc/passwd", "a//b", "./a", "a/..", "\0")
        ],
        *[
            ("files", {"a": record})
            for record in ({}, 5, {"size": -1, "sha256": "0" * 64}, {"size": 1, "sha256": "../../x"})
        ],
        ("files", {"a": {"size": 9, "sha256": "0" * 64, "pieces": ["0" * 64], "piece_bytes": 0}}),
        ("history", [{"path": "../../secret", "size": 1, "sha256": "0" * 64}]),
        ("step", 11),
    ],
)
def test_a_marker_leads_nowhere_out_of_the_artifact(tmp_path: Path, field: str, value: Any) -> None:
    store = Store.open(str(tmp_path))
    writing = attempt(store, tmp_path)
    with store.writer(writing.folder("step-00000010/w")) as writer:
        writer.write(b"x")
    marker = writing.commit_checkpoint(10, {}, files={"w": writer.record}).marker
    store.replace(
        "pretrain/f/checkpoints/00000010.json",
        json.dumps(json.loads(to_json(marker)) | {field: value}).encode(),
    )
    with pytest.raises(StoreError, match=r"not a path inside the store|is damaged"):
        Artifact(store, "pretrain/f").checkpoint(10)


def test_a_unit_names_files_of_its_own_artifact_only(store: Store, tmp_path: Path) -> None:
    writing = attempt(store, tmp_path)
    (tmp_path / "file").write_bytes(b"x")
    writing.commit_unit("a", files={"f": tmp_path / "file"})
    unit = writing.committed_unit("a")
    elsewhere = unit.files["f"].model_copy(update={"path": "corpus/other/attempts/a/secret"})
    store.write_once("pretrain/f/units/b.json", to_json(unit.model_copy(update={"files": {"f": elsewhere}})))
    with pytest.raises(StoreError, match="not a path inside the artifact"):
        writing.unit("b")
