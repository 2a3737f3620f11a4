"""Compares two recipes, stages, runs or stored artifacts: fields, inputs, and results side by side.

Invariants: it only reads. Identity fields are distinguished from execution fields by what was hashed, not by
their names. Losses are compared only where the lineages have consumed equally many tokens.
"""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from flows.format import is_number
from flows.planning.graph import Input
from flows.planning.plan import make
from flows.provenance.lookup import find
from flows.provenance.moved_scores import MovedScores, moved_scores
from flows.stored_part import StoredPart, planned_part
from infra.store import Artifact, Store, StoreError, runs
from infra.store.reading.lineage import tokens_before
from specs.base import flatten
from specs.differences import Change, changes
from specs.pipeline import DEFAULT_STORE
from specs.published import Compared
from specs.recipe import load

POINTS = 8  # steps at which losses are shown
PARENT = "parent"  # input of a segment: the checkpoint that it resumes from


@dataclass(frozen=True)
class Side:
    label: str
    parts: dict[str, StoredPart]
    chosen: bool = False  # a stage or part was named, so it is compared whatever its name


class Losses(NamedTuple):
    """A loss of two parts whose lineages had consumed equally many tokens."""

    tokens: int
    name: str
    a: float
    b: float


@dataclass
class Difference:
    """Two parts side by side; None for a part that only one side has."""

    name: str
    a: StoredPart | None
    b: StoredPart | None
    identity: list[Change[Any]] = field(default_factory=list)  # fields that were hashed
    execution: list[Change[Any]] = field(default_factory=list)  # fields that were not, and that both have
    inputs: list[Change[str]] = field(default_factory=list)
    metrics: list[Change[float]] = field(default_factory=list)  # for equal fingerprints, those that differ
    losses: list[Losses] = field(default_factory=list)
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

    @property
    def differing(self) -> str:
        """All that differs, to find parts that differ in the same way."""
        values = (self.identity, self.execution, self.inputs, self.metrics, self.losses, self.scores)
        return repr((self.verdict, *values))

    def to_json(self) -> dict[str, Any]:
        fields = ("identity", "execution", "inputs", "metrics")
        return {
            "name": self.name,
            "verdict": self.verdict,
            "fingerprints": [part.fingerprint if part else None for part in (self.a, self.b)],
            **{name: [change.to_json() for change in getattr(self, name)] for name in fields},
            "losses": [row._asdict() for row in self.losses],
            "published": [{"side": side, **asdict(score)} for side, score in self.published],
            "scores": self.scores.to_json() if self.scores is not None else None,
        }


# The two sides


def side(text: str, store: str | None, other: str = "") -> Side:
    """The side that an argument names: `SPEC.yaml`, `SPEC.yaml:STAGE`, `:STAGE` of the spec that `other`
    names, `RUN@TIME`, or anything stored (`provenance.lookup.find`). SpecError or StoreError if it names
    nothing."""
    if text.startswith(":"):
        text = other.partition(":")[0] + text
    spec, _, stage = text.partition(":")
    if Path(spec).suffix in (".yaml", ".yml") or Path(spec).is_file():
        pipeline = load(spec)
        plan = make(pipeline, Store.open(store or pipeline.store))
        nodes = plan.named(stage, spec) if stage else plan.graph.nodes.values()
        return Side(text, {node.name: planned_part(plan, node) for node in nodes}, bool(stage))
    opened = Store.open(store or DEFAULT_STORE)
    run, _, stamp = text.partition("@")
    if ":" not in text and run in runs.names(opened):
        return _of_run(text, opened, run, stamp)
    parts = [StoredPart.of(artifact) for artifact in find(opened, text)]
    return Side(text, {part.name: part for part in parts}, len(parts) == 1)


def _of_run(label: str, store: Store, run: str, stamp: str) -> Side:
    stamps = [time for time in runs.stamps(store, run) if time.startswith(stamp)]
    if not stamps:
        times = ", ".join(runs.stamps(store, run))
        raise StoreError(f"run '{run}' has no record that begins with '{stamp}'; it has {times}")
    places = runs.read(store, run, stamps[-1]).parts.items()
    parts = {name: StoredPart(Artifact(store, *place), name) for name, place in places}
    return Side(label, {n: part for n, part in parts.items() if store.exists(f"{part.path}/identity.json")})


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
    paired_a, paired_b = {ours for ours, _ in pairs}, {theirs for _, theirs in pairs}
    beside = [(ours, theirs) for theirs, ours in _beside(b, a) if theirs not in paired_b]
    beside += [(ours, theirs) for ours, theirs in _beside(a, b) if ours not in paired_a]
    pairs += beside
    only_a = [name for name in a.parts if name not in {ours for ours, _ in pairs}]
    only_b = [name for name in b.parts if name not in {theirs for _, theirs in pairs}]
    if a.chosen and b.chosen and not beside:
        both = list(zip(only_a, only_b, strict=False))
        pairs, only_a, only_b = pairs + both, only_a[len(both) :], only_b[len(both) :]
    order = list(a.parts)
    rows = sorted([*pairs, *((name, "") for name in only_a)], key=lambda pair: order.index(pair[0]))
    return [
        _difference(" | ".join(dict.fromkeys(filter(None, pair))), a.parts.get(pair[0]), b.parts.get(pair[1]))
        for pair in [*rows, *(("", name) for name in only_b)]
    ]


def _beside(branched: Side, original: Side) -> list[tuple[str, str]]:
    """Pairs of segments: one that branches off inside a stage of the other side, and that stage's own."""
    pairs: dict[str, str] = {}
    names = {part.fingerprint: name for name, part in original.parts.items()}
    own = {part.fingerprint: name for name, part in branched.parts.items()}

    for name, part in branched.parts.items():
        if name in original.parts or part.fingerprint in names or PARENT not in part.inputs:
            continue
        parent = part.inputs[PARENT]
        origin = pairs.get(own.get(parent.fingerprint, "")) or names.get(parent.fingerprint)
        if origin is None:
            continue
        branched_off = original.parts[origin]
        there, end = branched_off.fingerprint, int(branched_off.fields.get("end_step", 0))
        if there == parent.fingerprint and (parent.step or 0) < end:
            pairs[name] = origin
            continue
        for following, other in original.parts.items():
            same_stage = following.split("/")[0] == origin.split("/")[0]
            if same_stage and PARENT in other.inputs and other.inputs[PARENT].fingerprint == there:
                pairs[name] = following
                break
    return list(pairs.items())


def _difference(name: str, a: StoredPart | None, b: StoredPart | None) -> Difference:
    difference = Difference(name, a, b)
    if a is None or b is None:
        return difference
    if a.kind != b.kind:
        difference.identity.append(Change("kind", a.kind, b.kind))
    hashed = flatten(a.spec) | flatten(b.spec)
    for change in changes(a.fields, b.fields):
        if change.name in hashed:
            difference.identity.append(change)
        elif change.only_in is None:
            difference.execution.append(change)
    difference.inputs = [
        Change(change.name, _input(change.a), _input(change.b)) for change in changes(a.inputs, b.inputs)
    ]
    # for equal fingerprints, measurements are shown where they differ, at another step of the trajectory
    same = a.fingerprint == b.fingerprint
    ours, theirs = a.numbers, b.numbers
    for metric in ours:
        if metric in theirs and not (same and ours[metric] == theirs[metric]):
            difference.metrics.append(Change(metric, ours[metric], theirs[metric]))
    difference.losses = [row for row in _at_equal_tokens(a, b) if not (same and row.a == row.b)]
    difference.published = _published(a, b)
    if not same and a.manifest and b.manifest:
        difference.scores = moved_scores(a.artifact, b.artifact)
    return difference


def _input(input_: Input | None) -> str | None:
    return None if input_ is None else f"{input_.label} {input_.fingerprint[:8]}"


def _published(a: StoredPart, b: StoredPart) -> list[tuple[str, Compared]]:
    """Published scores beside the metrics of each side; a side without any takes the other's."""
    scores = a.published or b.published, b.published or a.published
    ours, theirs = (
        [score.compared(metric, part.numbers) for metric, score in published.items()]
        for part, published in zip((a, b), scores, strict=True)
    )
    if ours == theirs:
        return [("A, B", score) for score in ours]
    return [("A", score) for score in ours] + [("B", score) for score in theirs]


def _at_equal_tokens(a: StoredPart, b: StoredPart) -> Iterator[Losses]:
    """The losses at some of the token counts that both parts have, with the first and the last."""
    ours, theirs = _losses(a), _losses(b)
    for name in sorted(ours.keys() & theirs.keys()):
        common = sorted(ours[name].keys() & theirs[name].keys())
        for tokens in dict.fromkeys(
            common[round(index * (len(common) - 1) / (POINTS - 1))] for index in range(POINTS) if common
        ):
            yield Losses(tokens, name, ours[name][tokens], theirs[name][tokens])


def _losses(part: StoredPart) -> dict[str, dict[int, float]]:
    """The losses of a finished part by name and tokens of its lineage; empty if they cannot be read."""
    losses: defaultdict[str, dict[int, float]] = defaultdict(dict)
    tokens_at: dict[int, int] = {}
    if part.manifest is None:
        return losses
    try:
        begin = tokens_before(part.artifact.store, part.path) - int(part.spec.get("start_tokens", 0))
        for row in part.history():
            held_out = row.get("validation")
            measured = {f"validation/{name}": loss for name, loss in held_out.items()} if held_out else {}
            if is_number(row.get("tokens")):
                tokens_at[row["step"]] = begin + int(row["tokens"])
                measured["loss"] = row.get("loss")
            for name, loss in measured.items():
                if is_number(loss) and row.get("step") in tokens_at:
                    losses[name][tokens_at[row["step"]]] = loss
    except (StoreError, OSError, ValueError, KeyError, AttributeError):
        return {}
    return losses


def to_json(a: Side, b: Side, differences: list[Difference]) -> dict[str, Any]:
    return {"a": a.label, "b": b.label, "parts": [difference.to_json() for difference in differences]}
