"""The read model of a part: what status, report, diff, lineage, inspection and the Python API read of it.

A part is read from the store (`StoredPart`), or through a plan, which says what a run does (`PlannedPart`).

Invariant: it only reads, through markers, and each marker when it is asked for first.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Literal

from flows.format import is_number
from flows.planning.graph import FOLDER, TOKENIZER, Input, Node
from flows.planning.plan import Plan, Step
from infra.store import Artifact, StoreError
from infra.store.documents import CheckpointMarker, Manifest
from specs.base import flatten
from specs.errors import SpecError
from specs.published import PublishedScore
from specs.stages.base import Stage

State = Literal["finished", "gate failed", "held", "interrupted", "not run"]
DONE = ("finished", "gate failed")
# fields in which a part also has what other stages ask for, beside what its own stage states
WITH_MORE = ("checkpoint.milestones", "checkpoint.best")


@dataclass(frozen=True)
class SourceFiles:
    """Files outside the store, as parts that read them state them; several sources may be the same files.
    `digest`: of their content; `facts`: those of `SHOWN` that are known, and others."""

    SHOWN: ClassVar[tuple[str, ...]] = ("url", "format", "language", "license")
    name: str
    digest: str
    facts: dict[str, Any]
    files: int = 0
    bytes: int = 0

    @property
    def license(self) -> str:
        return str(self.facts.get("license") or "")

    @property
    def language(self) -> str:
        return str(self.facts.get("language") or "")


@dataclass(frozen=True)
class StoredPart:
    """A part as the store describes it. `artifact` is its folder and, of training, the step of its end."""

    artifact: Artifact
    name: str

    @classmethod
    def of(cls, artifact: Artifact, name: str = "") -> StoredPart:
        """A stored part; its name by default is that under which it was made."""
        return cls(artifact, name or artifact.identity.name)

    @property
    def kind(self) -> str:
        return self.path.split("/")[0]

    @property
    def fingerprint(self) -> str:
        return self.path.split("/")[1]

    @property
    def path(self) -> str:
        return self.artifact.path

    @cached_property
    def spec(self) -> dict[str, Any]:
        """The fields that were hashed into the fingerprint."""
        return self.artifact.identity.spec

    @cached_property
    def inputs(self) -> dict[str, Input]:
        return {role: Input.stored(input_) for role, input_ in self.artifact.identity.inputs.items()}

    @cached_property
    def fields(self) -> dict[str, Any]:
        """All resolved fields by dotted name, as far as they are recorded, without `WITH_MORE`."""
        hashed = flatten(self.spec)
        if self.manifest is None:
            return hashed
        execution = self.manifest.execution
        return _without_more(flatten({**execution.spec, "launch": execution.launch})) | hashed

    @property
    def published(self) -> dict[str, PublishedScore]:
        """The published scores of metrics, which only recipes state."""
        return {}

    @cached_property
    def marker(self) -> Manifest | CheckpointMarker | None:
        """The manifest of a finished part, else its last checkpoint's marker. StoreError if damaged."""
        return self.artifact.manifest if self.artifact.complete else None

    @property
    def manifest(self) -> Manifest | None:
        return self.marker if isinstance(self.marker, Manifest) else None

    @property
    def metrics(self) -> dict[str, Any]:
        """The metrics of the part, or what its last checkpoint states."""
        if isinstance(self.marker, CheckpointMarker):
            return {name: fact for name, fact in self.marker.facts.items() if name != "passes"}
        return self.marker.metrics if self.marker else {}

    @property
    def results(self) -> dict[str, Any]:
        """The metrics of a finished part; empty for others."""
        return self.manifest.metrics if self.manifest else {}

    @property
    def numbers(self) -> dict[str, float]:
        """The results that are numbers, by dotted name."""
        return {name: value for name, value in flatten(self.results).items() if is_number(value)}

    @property
    def facts(self) -> dict[str, Any]:
        return self.marker.facts if self.marker else {}

    @property
    def seconds(self) -> dict[str, float]:
        """The seconds of start-up, compute and storage, over all attempts."""
        return self.marker.seconds.model_dump() if self.marker and self.marker.seconds else {}

    @property
    def files(self) -> dict[str, int]:
        """The size of each file in bytes."""
        return {name: record.size for name, record in self.marker.files.items()} if self.marker else {}

    @property
    def bytes(self) -> int:
        return sum(self.files.values())

    @property
    def versions(self) -> dict[str, str]:
        """The versions of Python and the libraries, by name."""
        return self.manifest.versions if self.manifest else {}

    @property
    def created(self) -> str:
        return self.marker.created if self.marker else ""

    def attempts(self) -> Iterator[tuple[str, Iterator[dict[str, Any]]]]:
        """The attempts that led to the marker, in order, each with its rows of training."""
        if (marker := self.marker) is None:
            return
        for entry in marker.history:
            alone = marker.model_copy(update={"history": [entry]})
            yield entry.path.split("/")[0], self.artifact.history(alone)

    def history(self) -> Iterator[dict[str, Any]]:
        """The rows of training up to the marker."""
        for _, rows in self.attempts():
            yield from rows


@dataclass(frozen=True)
class PlannedPart(StoredPart):
    """A part of a plan. `damages`, if given, collects errors about its marker, which is then None."""

    plan: Plan
    damages: list[str] | None = None

    @property
    def step(self) -> Step:
        return self.plan.steps[self.name]

    @property
    def node(self) -> Node:
        return self.step.node

    @property
    def stage(self) -> str:
        """The name of its stage."""
        return self.node.stage

    @property
    def stated(self) -> Stage:
        """Its stage, as the recipe states it."""
        return self.plan.pipeline.stages[self.stage]

    @cached_property
    def spec(self) -> dict[str, Any]:
        return self.node.identity

    @cached_property
    def inputs(self) -> dict[str, Input]:
        return self.node.inputs

    @property
    def settings(self) -> dict[str, Any]:
        """All resolved settings: of the part, and of its launch."""
        return {"part": self.node.part.to_json(), "launch": self.node.launch.to_json()}

    @cached_property
    def fields(self) -> dict[str, Any]:
        """All resolved fields by dotted name; of `WITH_MORE`, what its own stage states."""
        fields = _without_more(flatten({**self.settings["part"], "launch": self.settings["launch"]}))
        for phase in self.stated.phases(self.stage):
            if phase.name == self.node.phase:
                saving = phase.training.checkpoint
                fields |= {"checkpoint.milestones": saving.milestones, "checkpoint.best": saving.best}
        return fields

    @property
    def published(self) -> dict[str, PublishedScore]:
        return self.stated.published_scores() if self.kind == self.stated.kind else {}

    @cached_property
    def marker(self) -> Manifest | CheckpointMarker | None:
        try:
            if self.step.action == "reuse":
                return self.artifact.manifest
            if self.step.resume_step is not None:
                return self.artifact.checkpoint(self.step.resume_step).marker
        except StoreError as error:
            if self.damages is None:
                raise
            self.damages.append(str(error))
        return None

    @property
    def state(self) -> State:
        step = self.step
        if step.gate_failures:
            return "gate failed"
        if step.action == "reuse":
            return "finished"
        return "held" if step.holder else "interrupted" if step.stored else "not run"

    @property
    def done_until(self) -> int | None:
        """The last step of training that is stored."""
        return self.node.end_step if self.step.action == "reuse" else self.step.resume_step

    @property
    def done_steps(self) -> int:
        return 0 if self.done_until is None else self.done_until - self.node.start_step

    @property
    def done_tokens(self) -> int:
        return 0 if self.done_until is None else self.node.tokens_until(self.done_until)

    @property
    def tokens(self) -> int:
        """The tokens that it trains on, or that a finished corpus holds."""
        return self.node.tokens or int(self.results.get("tokens", 0) if self.kind == "corpus" else 0)

    def to_json(self) -> dict[str, Any]:
        """The part as `apertus status --json` prints it."""
        manifest = self.manifest
        return {
            "name": self.name,
            "kind": self.kind,
            "state": self.state,
            "reason": self.step.reason,
            "holder": self.step.holder,
            "fingerprint": self.fingerprint,
            "path": self.path if self.step.stored else None,
            "steps": self.node.steps,
            "tokens": self.tokens,
            "seconds": (self.seconds or None) if manifest else None,
            "metrics": manifest.metrics if manifest else None,
            "created": manifest.created if manifest else None,
        }


def planned_part(plan: Plan, node: Node, damages: list[str] | None = None) -> PlannedPart:
    """A part of a plan; `damages` as in `PlannedPart`."""
    return PlannedPart(node.artifact(plan.store), node.name, plan, damages)


def planned_parts(plan: Plan, damages: list[str] | None = None) -> dict[str, PlannedPart]:
    """All parts of a plan by name, inputs first."""
    return {name: planned_part(plan, node, damages) for name, node in plan.graph.nodes.items()}


def planned_source(plan: Plan, name: str, digest: str) -> SourceFiles:
    """The documents, or the model, outside the store that parts of a plan read under a name."""
    source, listing = plan.pipeline.sources.get(name), plan.graph.listings.get(name)
    model = plan.graph.models.get(name.removesuffix(TOKENIZER).removesuffix(FOLDER))
    facts = source.to_json() if source else dict(model.facts) if model else {}
    return SourceFiles(name, digest, facts, *((len(listing.files), listing.bytes) if listing else ()))


def finished(plan: Plan, node: Node, where: str = "inspect") -> Artifact:
    """The artifact of a part that has been made. SpecError at `where` when it has not."""
    artifact = node.artifact(plan.store)
    if not artifact.complete:
        problem = f"'{node.name}' has not been made yet, so there is nothing to look at"
        raise SpecError.of((), problem, f"apertus run ... --until {node.stage}", where)
    return artifact


def _without_more(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if not name.startswith(WITH_MORE)}


def training_rows(plan: Plan, stages: Collection[str]) -> list[dict[str, Any]]:
    """The rows of the parts of stages, in order; for an unfinished part, those up to its last checkpoint.
    Nested metrics have names with slashes: `validation/web`."""
    duplicates = plan.graph.duplicates
    rows = []
    for part in planned_parts(plan).values():
        if part.stage not in stages or part.node.end_step is None or part.name in duplicates:
            continue
        about = {"run": plan.pipeline.name, "stage": part.stage, "part": part.name}
        for attempt, attempt_rows in part.attempts():
            rows += [{**about, "attempt": attempt, **_flat(row)} for row in attempt_rows]
    return rows


def _flat(row: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in row.items():
        flat |= _flat(value, f"{prefix}{name}/") if isinstance(value, dict) else {f"{prefix}{name}": value}
    return flat
