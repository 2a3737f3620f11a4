"""Checkpoints whose files a test has written by hand."""

from __future__ import annotations

import hashlib
from typing import Any

from infra.store import Attempt, Store
from infra.store.files.sinks import write_whole
from infra.store.records import make_record, piece_digests, sidecar_path


def sealed(attempt: Attempt, step: int) -> dict[str, dict[str, Any]]:
    """Records of the files in the attempt's `checkpoint_folder(step)`, as `commit_checkpoint` takes them."""
    folder = attempt.folder(attempt.checkpoint_folder(step))
    return {name: seal(attempt.store, f"{folder}/{name}") for name in attempt.store.names(folder)}


def seal(store: Store, path: str) -> dict[str, Any]:
    """The record of a stored file, and its sidecar where it needs one."""
    data = store.read_bytes(path)
    pieces = piece_digests(data, store.piece_bytes)
    record, sidecar = make_record(len(data), hashlib.sha256(data).hexdigest(), pieces, store.piece_bytes)
    if sidecar is not None:
        write_whole(store, sidecar_path(path), sidecar)
    return record
