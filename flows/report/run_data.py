"""The content of the report of a run, as plain values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from flows.planning.graph import Input
from flows.report.classifiers import Classified
from flows.report.experiments import Experiment
from flows.report.history import Curve
from flows.report.results import ComparedTokenizers, Evaluation, Prompt
from flows.report.task_answers import TaskAnswers
from specs.planted import PlantedRecord

State = Literal["finished", "gate failed", "partial", "not run"]
SECONDS = ("startup", "compute", "storage")


@dataclass(frozen=True)
class Part:
    """One part of a stage with the facts of its manifest or its last checkpoint."""

    name: str
    stage: str
    kind: str
    state: State
    reason: str
    fingerprint: str
    path: str | None
    steps: int
    done_steps: int
    tokens: int
    done_tokens: int
    flops: int
    inputs: dict[str, Input]
    settings: dict[str, Any]
    metrics: dict[str, Any] = field(default_factory=dict)
    passes: dict[str, float] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    files: dict[str, int] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    created: str = ""

    @property
    def bytes(self) -> int:
        return sum(self.files.values())


@dataclass(frozen=True)
class Stage:
    """A stage of the recipe."""

    name: str
    kind: str
    description: str
    parts: list[Part]
    reads: list[str]  # stages whose parts it reads
    after: list[str]  # stages that it only waits for
    result: dict[str, Any]
    variants: list[Stage] = field(default_factory=list)  # stages that are drawn as this one

    @property
    def finished(self) -> int:
        """The number of variants, or of parts, that are finished."""
        members: Sequence[Stage | Part] = self.variants if len(self.variants) > 1 else self.parts
        return sum(member.state in ("finished", "gate failed") for member in members)

    @property
    def state(self) -> State:
        states = {part.state for part in self.parts}
        if "gate failed" in states:
            return "gate failed"
        if len(states) == 1:
            return next(iter(states))
        return "partial"


@dataclass(frozen=True)
class Share:
    """One source in a mixture."""

    source: str
    share: float
    tokens: int | None  # None before the source is built
    passes: float | None  # over the source through this mixture; None where nothing was trained
    passes_in_all: float | None


@dataclass(frozen=True)
class Source:
    """Documents outside the store."""

    name: str
    facts: dict[str, str]
    files: int
    bytes: int
    digest: str


@dataclass(frozen=True)
class Run:
    """A whole run."""

    name: str
    description: str
    store: str
    parameters: int
    stages: list[Stage]
    boxes: list[Stage]  # the stages as the graph shows them
    curves: list[Curve]
    mixtures: dict[str, list[Share]]
    evaluations: list[Evaluation]
    agreements: list[Evaluation]  # of rewards with labels
    tokenizers: list[ComparedTokenizers]
    classifiers: list[Classified]
    prompts: list[Prompt]
    answers: dict[str, list[TaskAnswers]]  # to tasks, by part
    experiments: dict[str, Experiment]
    sources: list[Source]
    planted: list[tuple[str, PlantedRecord]]  # with the names of their corpora
    notes: list[str]

    @property
    def parts(self) -> list[Part]:
        return [part for stage in self.stages for part in stage.parts]

    @property
    def _stored(self) -> list[Part]:
        """Parts with something in the store; two names of one artifact count once."""
        return list({(part.path, part.done_steps): part for part in self.parts if part.path}.values())

    @property
    def seconds(self) -> dict[str, float]:
        return {name: sum(part.seconds.get(name, 0.0) for part in self._stored) for name in SECONDS}

    @property
    def bytes(self) -> int:
        return sum(part.bytes for part in self._stored)

    @property
    def newest(self) -> str:
        """The time at which the newest manifest or checkpoint was written."""
        return max((part.created for part in self.parts), default="")

    @property
    def versions(self) -> dict[str, list[str]]:
        """All versions of every library used."""
        found: dict[str, set[str]] = {}
        for part in self.parts:
            for library, version in part.versions.items():
                found.setdefault(library, set()).add(version)
        return {library: sorted(versions) for library, versions in sorted(found.items())}
