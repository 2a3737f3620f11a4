"""An attempt in a store, and a checkpoint of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from infra.store import Attempt, Store
from specs.base import fingerprint
from tests.jobs import job_at

FINGERPRINT = fingerprint("corpus", 1, {"seed": 1}, {})


def attempt(store: Store, tmp_path: Path, name: str = "first", **fields: Any) -> Attempt:
    fields = {"node": "n", "identity": {"seed": 1}} | fields
    return Attempt(job_at(f"corpus/{FINGERPRINT}", store, tmp_path, name, **fields), store)


def save(writing: Attempt, step: int) -> None:
    folder = writing.folder(Attempt.checkpoint_folder(step))
    writing.store.fs.makedirs(writing.store.full(folder), exist_ok=True)
    writing.store.fs.pipe_file(writing.store.full(f"{folder}/shard.bin"), f"weights {step}".encode())
