"""An attempt in a store, and a checkpoint of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from infra.store import Attempt, Store
from specs.base import fingerprint
from specs.job import Job

FINGERPRINT = fingerprint("corpus", 1, {"seed": 1}, {})


def attempt(store: Store, tmp_path: Path, name: str = "first", **fields: Any) -> Attempt:
    values: dict[str, Any] = {
        "node": "n",
        "kind": "corpus",
        "version": 1,
        "fingerprint": FINGERPRINT,
        "spec": {},
        "identity": {"seed": 1},
        "inputs": {},
        "launch": {},
        "store": store.url,
        "path": f"corpus/{FINGERPRINT}",
        "attempt": name,
        "scratch": str(tmp_path / f"scratch-{name}"),
        "progress": str(tmp_path / "progress"),
    }
    return Attempt(Job(**(values | fields)), store)


def save(writing: Attempt, step: int) -> None:
    folder = writing.folder(Attempt.checkpoint_folder(step))
    writing.store.fs.makedirs(writing.store.full(folder), exist_ok=True)
    writing.store.fs.pipe_file(writing.store.full(f"{folder}/shard.bin"), f"weights {step}".encode())
