"""Explains why a part that is not stored has to run: its differences from the most similar stored part.

It is compared with the part of the same name in the last run of the pipeline, or else with the stored
artifact of the same kind that has the fewest differences, one of the same name first, if it shares most of
the part's identity, and its name or an input. A store holds the work of unrelated recipes too, whose parts
explain nothing: a part without such an artifact is new. Of many artifacts, those in use come first.
"""

from flows.planning.graph import Input, Node
from flows.planning.run_records import Records
from infra.store import Artifact
from infra.store.documents import Identity
from specs.base import flatten
from specs.differences import Change, changes
from specs.errors import some_of
from specs.foreign import shown

LOOKED_AT = 100  # artifacts of a kind
SHOWN = 3


def difference(node: Node, records: Records) -> str:
    """The reason why a part that is not stored has to run: fields with their old and new values."""
    candidates = [
        (reasons, identity)
        for path in _looked_at(node.kind, records)
        if (identity := Artifact(records.store, path).readable_identity) is not None
        and _related(node, identity)
        and 2 * len(reasons := _reasons(node, identity)) < len({**flatten(node.identity), **node.inputs})
    ]
    best = min(candidates, key=lambda pair: (pair[1].name != node.name, len(pair[0])), default=None)
    last = records.last(node.name)
    if last and (identity := last.readable_identity) is not None and identity.kind == node.kind:
        best = (_reasons(node, identity), identity)
    if best is None:
        return "new"
    reasons, identity = best
    if not reasons:
        return "its files are gone from the store"
    text = some_of(reasons, SHOWN, "; ")
    if identity.name == node.name:
        return text
    return f"{text} (against {identity.name} {identity.fingerprint[:8]})"


def _looked_at(kind: str, records: Records) -> list[str]:
    """The artifacts of a kind with which a part is compared: all, or, of many, first those in use."""
    stored = dict.fromkeys(f"{kind}/{name}" for name in records.store.names(kind))
    if len(stored) <= LOOKED_AT:
        return list(stored)
    return list(dict.fromkeys(path for path in records.in_use if path in stored) | stored)[:LOOKED_AT]


def _related(node: Node, identity: Identity) -> bool:
    """Whether a stored artifact shares the name or an input of the part, or the part reads nothing."""
    shared = (
        role in identity.inputs and identity.inputs[role].fingerprint == input_.fingerprint
        for role, input_ in node.inputs.items()
    )
    return identity.name == node.name or not node.inputs or any(shared)


def _reasons(node: Node, identity: Identity) -> list[str]:
    reasons = []
    if identity.version != node.version:
        reasons.append(f"version of {node.kind}: {identity.version} -> {node.version}")
    for change in changes(flatten(node.identity), flatten(identity.spec)):
        old = "not set" if change.only_in == "a" else shown(change.b)
        new = "not set" if change.only_in == "b" else shown(change.a)
        reasons.append(f"{change.name}: {old} -> {new}")
    stored = {role: Input.stored(input_) for role, input_ in identity.inputs.items()}
    return reasons + [_input_reason(change) for change in changes(node.inputs, stored)]


def _input_reason(change: Change[Input]) -> str:
    now, before = change.a, change.b
    if before is None or now is None:
        return f"input {change.name}: {before.name if before else 'none'} -> {now.name if now else 'none'}"
    if before.fingerprint != now.fingerprint:
        what = f"documents of {now.name}" if now.place is None else now.name
        return f"{what} changed ({before.fingerprint[:8]} -> {now.fingerprint[:8]})"
    return f"{change.name}: step {before.step} -> {now.step} of {now.name}"
