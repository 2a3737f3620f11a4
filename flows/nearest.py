"""What a part differs in from the nearest one that is stored, so that a plan can say why it would run.

The part of the same name in the last run of the pipeline is looked at first; otherwise the stored artifact of the same kind with the
fewest differing fields.

Invariant: reading only. A damaged record costs an explanation, never a plan.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from flows.graph import Graph, Node
from infra.store import Artifact, Store, StoreError, runs
from infra.store.contents import protected_mark
from infra.store.store import to_json
from specs.base import flatten

LOOKED_AT = 100
SHOWN = 3


@dataclass(frozen=True)
class Record:
    """What the last run referred to under a name."""

    store: Store
    path: str
    step: int | None

    @property
    def complete(self) -> bool:
        return Artifact(self.store, self.path, self.step).complete


class Records:
    """The runs of one pipeline, newest first."""

    def __init__(self, store: Store, pipeline: str) -> None:
        self.store = store
        self.pipeline = pipeline
        self.folder = f"runs/{pipeline}"

    @cached_property
    def _last(self) -> dict[str, tuple[str, int | None]]:
        stamps = runs.stamps(self.store, self.pipeline)
        try:
            return runs.read(self.store, self.pipeline, stamps[-1]).parts if stamps else {}
        except StoreError:
            return {}

    def last(self, name: str) -> Record | None:
        """The part of that name in the last run."""
        entry = self._last.get(name)
        return Record(self.store, *entry) if entry else None

    def protect(self, node: Node) -> None:
        """Notes, outside the artifact, that a part of a protected stage has finished, so that its loss is noticed."""
        document = {"name": node.name, "path": node.path, "step": node.end_step}
        self.store.write_once(protected_mark(node.path, node.end_step), to_json(document))

    def had_finished(self, path: str, step: int | None) -> bool:
        """Whether `protect` was told of an artifact."""
        return self.store.exists(protected_mark(path, step))

    def write(self, graph: Graph, spec: dict[str, Any]) -> None:
        """Records that a run refers to these parts; `spec` is the recipe as resolved."""
        parts = {name: {"path": path, "step": step} for name, (path, step) in _parts(graph).items()}
        document = {"parts": parts, "spec": spec}
        self.store.write_once(f"{self.folder}/{runs.next_stamp(self.store, self.pipeline)}.json", to_json(document))

    def keep(self, graph: Graph, spec: dict[str, Any]) -> None:
        """The same, unless the last record refers to the same parts."""
        if self._last != _parts(graph):
            self.write(graph, spec)


def _parts(graph: Graph) -> dict[str, tuple[str, int | None]]:
    return {node.name: (node.path, node.end_step) for node in graph.nodes.values()}


def difference(node: Node, records: Records) -> str:
    """Why a part that is not stored has to run: field, old value, new value."""
    candidates = [identity for path in _candidates(node, records) if (identity := _identity(records.store, path)) is not None]
    best = min(((_changes(node, identity), identity) for identity in candidates), key=lambda pair: len(pair[0]), default=None)
    last = records.last(node.name)
    if last is not None and (identity := _identity(records.store, last.path)) is not None and identity["kind"] == node.kind:
        best = (_changes(node, identity), identity)
    if best is None:
        return "new"
    changes, identity = best
    shown = "; ".join(changes[:SHOWN]) + (f"; and {len(changes) - SHOWN} more" if len(changes) > SHOWN else "")
    if not changes:
        return "its files are gone from the store"
    return shown if identity["name"] == node.name else f"{shown} (against {identity['name']} {identity['fingerprint'][:8]})"


def _candidates(node: Node, records: Records) -> list[str]:
    return [f"{node.kind}/{name}" for name in records.store.names(node.kind)[-LOOKED_AT:]]


def _identity(store: Store, path: str) -> dict[str, Any] | None:
    try:
        return Artifact(store, path).identity
    except StoreError:
        return None


def _changes(node: Node, identity: dict[str, Any]) -> list[str]:
    changes = []
    if identity["version"] != node.version:
        changes.append(f"version of {node.kind}: {identity['version']} -> {node.version}")
    old, new = flatten(identity["spec"]), flatten(node.identity)
    for name in [*new, *(name for name in old if name not in new)]:
        if old.get(name) != new.get(name):
            changes.append(f"{name}: {_shown(old, name)} -> {_shown(new, name)}")
    for role in [*node.inputs, *(role for role in identity["inputs"] if role not in node.inputs)]:
        before, now = identity["inputs"].get(role), node.inputs.get(role)
        if before is None or now is None:
            changes.append(f"input {role}: {before.get('name') or role if before else 'none'} -> {now.name if now else 'none'}")
        elif before["fingerprint"] != now.fingerprint:
            what = f"documents of {now.name} changed" if now.node is None else f"{now.name} changed"
            changes.append(f"{what} ({before['fingerprint'][:8]} -> {now.fingerprint[:8]})")
        elif before.get("step") != now.step:
            changes.append(f"{role}: step {before.get('step')} -> {now.step} of {now.name}")
    return changes


def _shown(fields: dict[str, Any], name: str) -> str:
    return f"{fields[name]!r}" if name in fields else "not set"
