"""What an artifact was made from, read from the store alone.

Invariant: the answer needs no recipe: `identity.json` of every artifact names its inputs by their place in the store.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from infra.store.artifact import Artifact
from infra.store.documents import FIX, Identity, Input, Manifest
from infra.store.records import DamagedError
from infra.store.store import Store, StoreError


@dataclass(frozen=True)
class Ancestor:
    """One artifact of a lineage. `manifest` is None where a checkpoint was read before its stage had ended."""

    path: str
    step: int | None
    identity: Identity
    manifest: Manifest | None

    @property
    def name(self) -> str:
        return self.identity.name

    @property
    def kind(self) -> str:
        return self.identity.kind

    @property
    def recorded(self) -> dict[str, Any]:
        """The resolved spec as the manifest records it; empty where there is none."""
        return self.manifest.execution.spec if self.manifest else {}

    @property
    def spec(self) -> dict[str, Any]:
        """The resolved spec: what was hashed, and around it what was only recorded."""
        return {**self.recorded, **self.identity.spec}

    @property
    def inputs(self) -> dict[str, Input]:
        """What it was made from, by role."""
        return self.identity.inputs

    def source(self, role: str) -> dict[str, Any]:
        """What was recorded of the documents behind an input: url, format, language, license, as far as the recipe stated them."""
        spec = {**self.identity.spec, **self.recorded}
        named, index = spec.get("source"), role.partition(":")[2]
        if named is None and isinstance(spec.get("sources"), list) and index.isdecimal() and int(index) < len(spec["sources"]):
            named = spec["sources"][int(index)]
        if isinstance(named, dict):
            return dict(named)
        return {name: spec[name] for name in ("url", "language", "license") if spec.get(name)}

    @property
    def steps(self) -> int:
        """Optimizer steps of this part up to the step that was read; 0 for what does not train."""
        return self.step - int(self.spec.get("start_step", 0)) if self.step is not None and "global_batch_size" in self.spec else 0

    @property
    def tokens(self) -> int:
        """Tokens that these steps consumed."""
        return self.steps * int(self.spec["global_batch_size"]) * int(self.spec["sequence_length"]) if self.steps else 0

    @property
    def metrics(self) -> dict[str, Any]:
        return self.manifest.metrics if self.manifest else {}


def lineage(store: Store, path: str, step: int | None = None) -> list[Ancestor]:
    """An artifact and all that it was made from, inputs first. `step`: of a checkpoint. StoreError when a part of it is gone."""
    found: dict[tuple[str, int | None], Ancestor] = {}
    begun: set[tuple[str, int | None]] = set()

    def visit(path: str, step: int | None) -> None:
        if (path, step) in found:
            return
        _once(store, path, (path, step) in begun)
        begun.add((path, step))
        identity = Artifact(store, path).identity
        for read in identity.inputs.values():
            if read.place is not None:
                visit(read.place, read.step)
        try:
            manifest = Artifact(store, path, step).manifest
        except StoreError:
            manifest = None
        found[path, step] = Ancestor(path, step, identity, manifest)

    visit(path, step)
    return list(found.values())


def _once(store: Store, path: str, again: bool) -> None:
    if again:
        what = f"'{path}/identity.json' in the store {store.url}"
        raise DamagedError(f"{what} is damaged: it names itself, or what was made from it, as an input; {FIX}")


def tokens_before(store: Store, path: str, below: frozenset[str] = frozenset()) -> int:
    """Tokens that the lineage of a part had trained on when it began; of several checkpoints that it was made from, the most. StoreError
    when a part of it is gone. `below`: what is made from it, on the way from where the question was asked."""
    _once(store, path, path in below)
    found = 0
    for role, read in Artifact(store, path).identity.inputs.items():
        if read.place is not None and read.step is not None and role.split(":")[0] in ("parent", "checkpoint"):
            spec = Artifact(store, read.place).identity.spec
            own = 0
            if "global_batch_size" in spec:
                own = (read.step - int(spec.get("start_step", 0))) * spec["global_batch_size"] * spec["sequence_length"]
            found = max(found, tokens_before(store, read.place, below | {path}) + own)
    return found
