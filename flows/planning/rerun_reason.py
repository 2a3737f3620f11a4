"""Why a part that is not stored has to run: what it differs in from the stored one that is most like it.

The part of the same name in the last run of the pipeline is looked at first; otherwise the stored artifact of the same kind with the
fewest differing fields.
"""

from __future__ import annotations

from typing import Any

from flows.planning.graph import Node
from flows.planning.run_records import Records
from infra.store import Artifact, Store, StoreError
from infra.store.documents import Identity
from specs.base import flatten

LOOKED_AT = 100
SHOWN = 3


def difference(node: Node, records: Records) -> str:
    """Why a part that is not stored has to run: field, old value, new value."""
    candidates = [identity for path in _candidates(node, records) if (identity := _identity(records.store, path)) is not None]
    best = min(((_changes(node, identity), identity) for identity in candidates), key=lambda pair: len(pair[0]), default=None)
    last = records.last(node.name)
    if last is not None and (identity := _identity(records.store, last.path)) is not None and identity.kind == node.kind:
        best = (_changes(node, identity), identity)
    if best is None:
        return "new"
    changes, identity = best
    shown = "; ".join(changes[:SHOWN]) + (f"; and {len(changes) - SHOWN} more" if len(changes) > SHOWN else "")
    if not changes:
        return "its files are gone from the store"
    return shown if identity.name == node.name else f"{shown} (against {identity.name} {identity.fingerprint[:8]})"


def _candidates(node: Node, records: Records) -> list[str]:
    return [f"{node.kind}/{name}" for name in records.store.names(node.kind)[-LOOKED_AT:]]


def _identity(store: Store, path: str) -> Identity | None:
    try:
        return Artifact(store, path).identity
    except StoreError:
        return None


def _changes(node: Node, identity: Identity) -> list[str]:
    changes = []
    if identity.version != node.version:
        changes.append(f"version of {node.kind}: {identity.version} -> {node.version}")
    old, new = flatten(identity.spec), flatten(node.identity)
    for name in [*new, *(name for name in old if name not in new)]:
        if old.get(name) != new.get(name):
            changes.append(f"{name}: {_shown(old, name)} -> {_shown(new, name)}")
    for role in [*node.inputs, *(role for role in identity.inputs if role not in node.inputs)]:
        before, now = identity.inputs.get(role), node.inputs.get(role)
        if before is None or now is None:
            changes.append(f"input {role}: {before.name or role if before else 'none'} -> {now.name if now else 'none'}")
        elif before.fingerprint != now.fingerprint:
            what = f"documents of {now.name} changed" if now.node is None else f"{now.name} changed"
            changes.append(f"{what} ({before.fingerprint[:8]} -> {now.fingerprint[:8]})")
        elif before.step != now.step:
            changes.append(f"{role}: step {before.step} -> {now.step} of {now.name}")
    return changes


def _shown(fields: dict[str, Any], name: str) -> str:
    return f"{fields[name]!r}" if name in fields else "not set"
