"""Checkpoints whose files a test has written by hand."""

from __future__ import annotations

from typing import Any

from infra.store import Attempt
from infra.store.seal import seal


def sealed(attempt: Attempt, step: int) -> dict[str, dict[str, Any]]:
    """Records of the files in the attempt's `checkpoint_folder(step)`, as `commit_checkpoint` takes them."""
    folder = attempt.folder(attempt.checkpoint_folder(step))
    return {name: seal(attempt.store, f"{folder}/{name}") for name in attempt.store.names(folder)}
