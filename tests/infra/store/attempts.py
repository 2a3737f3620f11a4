"""An attempt in a store, and a checkpoint of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from infra.store import Attempt, Store
from specs.base import fingerprint
from tests.jobs import job_at

CORPUS = f"corpus/{fingerprint('corpus', 1, {'seed': 1}, {})}"


def attempt(store: Store, folder: Path, name: str = "first", path: str = CORPUS, **fields: Any) -> Attempt:
    return Attempt(job_at(path, store, folder, name, **{"identity": {"seed": 1}} | fields), store)


def save(writing: Attempt, step: int) -> None:
    folder = writing.folder(Attempt.checkpoint_folder(step))
    writing.store.fs.makedirs(writing.store.full(folder), exist_ok=True)
    writing.store.fs.pipe_file(writing.store.full(f"{folder}/shard.bin"), f"weights {step}".encode())
