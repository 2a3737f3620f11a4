"""Compares two recipes, stages, runs or stored artifacts: fields, inputs, and results side by side.

Invariants: it only reads. Identity fields are distinguished from execution fields by what was hashed,
not by their names. Losses are compared where the lineages have consumed equally many tokens, and nowhere
else.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from flows.format import is_number
from flows.planning.plan import Plan, make
from flows.provenance.lookup import Found, find
from flows.provenance.moved_scores import MovedScores, moved_scores
from infra.store import Artifact, Store, StoreError, runs
from infra.store.reading.lineage import tokens_before
from specs.base import flatten
from specs.differences import Change, ReadInput, changes
from specs.pipeline import DEFAULT_STORE
from specs.published import Compared, PublishedScore
from specs.recipe import load
from specs.stages.gates import Measuring
from specs.trajectory import phases

POINTS = 8  # steps at which losses are shown
PARENT = "parent"  # input of a segment: the checkpoint that it resumes from
# fields in which a part also has what other stages ask for, beside what its own stage states
WITH_MORE = ("checkpoint.milestones", "checkpoint.best")


@dataclass(frozen=True)
class Part:
    """One part of a side."""

    name: str
    kind: str
    fingerprint: str
    fields: dict[str, Any]  # all resolved fields, by dotted name
    identity: frozenset[str]  # names of the fields that were hashed
    inputs: dict[str, ReadInput]  # by role
    metrics: dict[str, float] = field(default_factory=dict)
    loss: dict[int, dict[str, float]] = field(default_factory=dict)  # rows of the history by consumed tokens
    published: dict[str, PublishedScore] = field(default_factory=dict)  # by metric; of recipe parts only
    artifact: Artifact | None = None  # None unless the part is finished


@dataclass(frozen=True)
class Side:
    """One side of a comparison."""

    label: str
    parts: dict[str, Part]
    chosen: bool  # a stage or part was named, so it is compared whatever its name


@dataclass
class Difference:
    """Two parts side by side; None for a part that only one side has."""

    name: str
    a: Part | None
    b: Part | None
    identity: list[Change[Any]] = field(default_factory=list)  # fields that were hashed
    execution: list[Change[Any]] = field(default_factory=list)  # fields that were not, and that both have
    inputs: list[Change[ReadInput]] = field(default_factory=list)
    metrics: list[Change[float]] = field(default_factory=list)  # for equal fingerprints, those that differ
    losses: list[tuple[int, str, float, float]] = field(default_factory=list)
    published: list[tuple[str, Compared]] = field(default_factory=list)  # with the sides: A, B or both
    scores: MovedScores | None = None  # of the same completions, where both are finished and differ

    @property
    def verdict(self) -> str:
        """`same`: the same fingerprint, so the same result; `execution`: the same, run in another way."""
        if self.a is None or self.b is None:
            return "only in B" if self.a is None else "only in A"
        if self.a.fingerprint != self.b.fingerprint:
            return "differs"
        return "execution" if self.identity or self.execution else "same"


# The two sides


def side(text: str, store: str | None, other: str = "") -> Side:
    """The side that an argument names: `SPEC.yaml`, `SPEC.yaml:STAGE`, `:STAGE` of the spec that `other`
    names, or anything stored (`flows.provenance.lookup.find`; `RUN@TIME` is an earlier record of a run).
    SpecError or StoreError when it names nothing."""
    if text.startswith(":"):
        text = other.partition(":")[0] + text
    spec, _, stage = text.partition(":")
    if Path(spec).suffix in (".yaml", ".yml") or Path(spec).is_file():
        pipeline = load(spec)
        return _of_plan(text, make(pipeline, Store.open(store or pipeline.store)), stage, spec)
    opened = Store.open(store or DEFAULT_STORE)
    run, _, stamp = text.partition("@")
    if ":" not in text and run in runs.names(opened):
        return _of_run(text, opened, run, stamp)
    found = find(opened, text)
    parts = [_stored(opened, one) for one in found]
    return Side(text, {part.name: part for part in parts}, len(parts) == 1)


def _of_plan(label: str, plan: Plan, stage: str, spec: str) -> Side:
    parts = {}
    for node in plan.named(stage, spec) if stage else plan.graph.nodes.values():
        full = flatten({**node.part.to_json(), "launch": node.launch.to_json()})
        for phase in phases(plan.pipeline, node.stage):
            if phase.name == node.phase:
                stated = phase.training.checkpoint
                own = {"checkpoint.milestones": stated.milestones, "checkpoint.best": stated.best}
                full = _without_more(full) | own
        inputs = {
            role: ReadInput(read.fingerprint, read.step, read.name) for role, read in node.inputs.items()
        }
        artifact = node.artifact(plan.store)
        hashed = frozenset(flatten(node.identity))
        finished = plan.steps[node.name].action == "reuse"
        results = _results(artifact) if finished else ({}, {})
        part = Part(node.name, node.kind, node.fingerprint, full, hashed, inputs, *results)
        part = replace(part, artifact=artifact if finished else None)
        measured = plan.pipeline.stages[node.stage]
        if isinstance(measured, Measuring) and node.kind == measured.kind:
            part = replace(part, published=measured.reference)
        parts[node.name] = part
    return Side(label, parts, bool(stage))


def _of_run(label: str, store: Store, run: str, stamp: str) -> Side:
    stamps = [one for one in runs.stamps(store, run) if one.startswith(stamp)]
    if not stamps:
        raise StoreError(
            f"run '{run}' has no record that begins with '{stamp}'; it has"
            f" {', '.join(runs.stamps(store, run))}"
        )
    record = runs.read(store, run, stamps[-1])
    parts = {}
    for name, (path, step) in record.parts.items():
        if store.exists(f"{path}/identity.json"):
            parts[name] = _stored(store, Found(path, step), name)
    return Side(label, parts, False)


def _stored(store: Store, found: Found, name: str = "") -> Part:
    artifact = Artifact(store, found.path, found.step)
    identity, hashed = artifact.identity, flatten(artifact.identity.spec)
    fields = hashed
    if artifact.complete:
        execution = artifact.manifest.execution
        fields = _without_more(flatten({**execution.spec, "launch": execution.launch}) | hashed)
    inputs = {
        role: ReadInput(read.fingerprint, read.step, read.name or read.place or "documents")
        for role, read in identity.inputs.items()
    }
    results = _results(artifact) if artifact.complete else ({}, {})
    part = Part(
        name or identity.name,
        identity.kind,
        identity.fingerprint,
        fields,
        frozenset(hashed),
        inputs,
        *results,
    )
    return replace(part, artifact=artifact if artifact.complete else None)


def _without_more(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if not name.startswith(WITH_MORE)}


def _results(artifact: Artifact) -> tuple[dict[str, float], dict[int, dict[str, float]]]:
    """The metrics of a finished part, and the rows of its history by the tokens that its lineage consumed."""
    manifest = artifact.manifest
    metrics = {name: value for name, value in flatten(manifest.metrics).items() if is_number(value)}
    rows: dict[int, dict[str, Any]] = {}
    tokens_at: dict[int, int] = {}
    try:
        begin = tokens_before(artifact.store, artifact.path) - int(
            artifact.identity.spec.get("start_tokens", 0)
        )
        for row in artifact.history():
            if is_number(row.get("tokens")):
                tokens = tokens_at[row["step"]] = begin + int(row["tokens"])
                rows.setdefault(tokens, {})["loss"] = row.get("loss")
            measured = row.get("validation")
            if isinstance(measured, dict) and row.get("step") in tokens_at:
                values = {f"validation/{name}": value for name, value in measured.items() if is_number(value)}
                rows.setdefault(tokens_at[row["step"]], {}).update(values)
    except (StoreError, OSError, ValueError, KeyError):
        return metrics, {}
    return metrics, {
        tokens: {name: value for name, value in row.items() if is_number(value)}
        for tokens, row in rows.items()
    }


# The comparison


def compare(a: Side, b: Side) -> list[Difference]:
    """The differences, part by part in the order of A, then the parts that only B has. Compared are parts of
    one name, parts of different names that are the same work, parts of a branch with those that they
    branch off, and, if both sides were chosen by name, the remaining parts in their order."""
    left = {part.fingerprint: name for name, part in b.parts.items() if name not in a.parts}
    pairs = [
        (name, duplicate)
        for name, part in a.parts.items()
        if (duplicate := name if name in b.parts else left.get(part.fingerprint)) is not None
    ]

    def unpaired() -> tuple[list[str], list[str]]:
        ours, theirs = {one for one, _ in pairs}, {other for _, other in pairs}
        return [one for one in a.parts if one not in ours], [one for one in b.parts if one not in theirs]

    only_a, only_b = unpaired()
    beside = [(one, other) for other, one in _beside(b, a) if other in only_b]
    beside += [(one, other) for one, other in _beside(a, b) if one in only_a]
    pairs += beside
    if a.chosen and b.chosen and not beside:
        pairs += zip(only_a, only_b, strict=False)
    only_a, only_b = unpaired()
    order = list(a.parts)
    found = [
        (one, _difference(one if one == other else f"{one} | {other}", a.parts[one], b.parts[other]))
        for one, other in pairs
    ]
    found += [(one, _difference(one, a.parts[one], None)) for one in only_a]
    found.sort(key=lambda pair: order.index(pair[0]))
    return [one for _, one in found] + [_difference(name, None, b.parts[name]) for name in only_b]


def _beside(branched: Side, original: Side) -> list[tuple[str, str]]:
    """Pairs of segments: one that resumes from inside a stage of the other side, and the segment of that
    stage that trains on from the same place."""
    pairs: dict[str, str] = {}
    names = {part.fingerprint: name for name, part in original.parts.items()}
    own = {part.fingerprint: name for name, part in branched.parts.items()}

    def of_stage(name: str, origin: str) -> bool:
        return name.split("/")[0] == origin.split("/")[0]

    for name, part in branched.parts.items():
        if name in original.parts or part.fingerprint in names or PARENT not in part.inputs:
            continue
        parent = part.inputs[PARENT]
        origin = pairs.get(own.get(parent.fingerprint, "")) or names.get(parent.fingerprint)
        if origin is None:
            continue
        there = original.parts[origin].fingerprint
        following = [
            other
            for other, one in original.parts.items()
            if of_stage(other, origin) and PARENT in one.inputs and one.inputs[PARENT].fingerprint == there
        ]
        inside = there == parent.fingerprint and (parent.step or 0) < int(
            original.parts[origin].fields.get("end_step", 0)
        )
        if counterpart := origin if inside else next(iter(following), None):
            pairs[name] = counterpart
    return list(pairs.items())


def _difference(name: str, a: Part | None, b: Part | None) -> Difference:
    found = Difference(name, a, b)
    if a is None or b is None:
        return found
    if a.kind != b.kind:
        found.identity.append(Change("kind", a.kind, b.kind))
    for change in changes(a.fields, b.fields):
        if change.name in a.identity | b.identity:
            found.identity.append(change)
        elif change.only_in is None:
            found.execution.append(change)
    found.inputs = changes(a.inputs, b.inputs)
    # for equal fingerprints, measurements are shown where they differ, at another step of the trajectory
    same = a.fingerprint == b.fingerprint
    for metric in a.metrics:
        if metric in b.metrics and not (same and a.metrics[metric] == b.metrics[metric]):
            found.metrics.append(Change(metric, a.metrics[metric], b.metrics[metric]))
    found.losses = [row for row in _losses(a, b) if not (same and row[2] == row[3])]
    found.published = _published(a, b)
    if not same and a.artifact is not None and b.artifact is not None:
        found.scores = moved_scores(a.artifact, b.artifact)
    return found


def _published(a: Part, b: Part) -> list[tuple[str, Compared]]:
    """Published scores beside the metrics of each side. A side without published scores, such as a run, is
    compared with those of the other side."""
    scores = a.published or b.published, b.published or a.published
    ours, theirs = (
        [score.compared(metric, part.metrics) for metric, score in stated.items()]
        for part, stated in zip((a, b), scores, strict=True)
    )
    if ours == theirs:
        return [("A, B", score) for score in ours]
    return [("A", score) for score in ours] + [("B", score) for score in theirs]


def _losses(a: Part, b: Part) -> Iterator[tuple[int, str, float, float]]:
    """(tokens, column, value of A, value of B) at some of the token counts that both have, with the first
    and the last."""
    names = {name for row in a.loss.values() for name in row} & {
        name for row in b.loss.values() for name in row
    }
    for name in sorted(names):
        common = sorted(
            tokens
            for tokens in a.loss.keys() & b.loss.keys()
            if name in a.loss[tokens] and name in b.loss[tokens]
        )
        chosen = (
            {common[round(index * (len(common) - 1) / (POINTS - 1))] for index in range(POINTS)}
            if common
            else set()
        )
        for tokens in sorted(chosen):
            yield tokens, name, a.loss[tokens][name], b.loss[tokens][name]


# As plain values


def named(change: Change[ReadInput]) -> Change[str]:
    """The inputs as text: name, step and the beginning of the fingerprint."""

    def text(read: ReadInput | None) -> str | None:
        if read is None:
            return None
        return f"{read.name}{f'@step={read.step}' if read.step is not None else ''} {read.fingerprint[:8]}"

    return Change(change.name, text(change.a), text(change.b), change.only_in)


def to_json(a: Side, b: Side, found: list[Difference]) -> dict[str, Any]:
    """The comparison as plain values."""

    def change(one: Change[Any]) -> dict[str, Any]:
        return {"name": one.name, "a": one.a, "b": one.b}

    return {
        "a": a.label,
        "b": b.label,
        "parts": [
            {
                "name": one.name,
                "verdict": one.verdict,
                "fingerprints": [part.fingerprint if part else None for part in (one.a, one.b)],
                "identity": [change(field_) for field_ in one.identity],
                "execution": [change(field_) for field_ in one.execution],
                "inputs": [change(named(read)) for read in one.inputs],
                "metrics": [change(metric) for metric in one.metrics],
                "losses": [
                    {"tokens": tokens, "name": name, "a": left, "b": right}
                    for tokens, name, left, right in one.losses
                ],
                "published": [{"side": side, **asdict(score)} for side, score in one.published],
                "scores": one.scores.to_json() if one.scores is not None else None,
            }
            for one in found
        ],
    }
