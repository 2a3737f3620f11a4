"""Attempts that end early, or note what they commit; and what an artifact holds."""

from __future__ import annotations

from typing import Any, ClassVar

from infra.store import Artifact, Attempt


class Interrupted(Exception):
    pass


class StopsAfterOneUnit(Attempt):
    """An attempt that dies after its first committed unit."""

    def commit_unit(self, key: str, **content: Any) -> dict[str, Any]:
        super().commit_unit(key, **content)
        raise Interrupted


class RecordsUnits(Attempt):
    """Notes the keys of the units that it commits; a test empties the list before."""

    committed: ClassVar[list[str]] = []

    def commit_unit(self, key: str, **content: Any) -> dict[str, Any]:
        self.committed.append(key)
        return super().commit_unit(key, **content)


def stored_bytes(artifact: Artifact) -> dict[str, bytes]:
    """The content of every file, by name."""
    return {name: artifact.bytes(name) for name in sorted(artifact.manifest.files)}
