"""What an artifact was made from, read from the store alone.

Invariant: the answer needs no recipe: `identity.json` of every artifact names its inputs by their place in the store.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from infra.store.artifact import Artifact
from infra.store.store import Store, StoreError


@dataclass(frozen=True)
class Ancestor:
    """One artifact of a lineage. `manifest` is empty where a checkpoint was read before its stage had ended."""

    path: str
    step: int | None
    identity: dict[str, Any]
    manifest: dict[str, Any]

    @property
    def name(self) -> str:
        return str(self.identity["name"])

    @property
    def kind(self) -> str:
        return str(self.identity["kind"])

    @property
    def spec(self) -> dict[str, Any]:
        """The resolved spec: what was hashed, and around it what was only recorded."""
        return {**self.manifest.get("execution", {}).get("spec", {}), **self.identity["spec"]}

    @property
    def metrics(self) -> dict[str, Any]:
        return dict(self.manifest.get("metrics", {}))


def lineage(store: Store, path: str, step: int | None = None) -> list[Ancestor]:
    """An artifact and all that it was made from, inputs first. `step`: of a checkpoint. StoreError when a part of it is gone."""
    found: dict[tuple[str, int | None], Ancestor] = {}

    def visit(path: str, step: int | None) -> None:
        if (path, step) in found:
            return
        identity = Artifact(store, path).identity
        for read in identity["inputs"].values():
            if read.get("path"):
                visit(read["path"], read.get("step"))
        try:
            manifest = Artifact(store, path, step).manifest
        except StoreError:
            manifest = {}
        found[path, step] = Ancestor(path, step, identity, manifest)

    visit(path, step)
    return list(found.values())
