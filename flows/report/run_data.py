"""The content of the report of a run, as plain values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from flows.report.experiments import Experiment
from flows.report.history import Curve
from flows.report.results import Classified, ComparedTokenizers, Evaluation, Prompt, TaskAnswers
from flows.stored_part import DONE, PlannedPart, SourceFiles
from specs.planted import PlantedRecord

State = Literal["finished", "gate failed", "partial", "not run"]  # of a stage
SECONDS = ("startup", "compute", "storage")


@dataclass(frozen=True)
class StageContent:
    name: str
    kind: str
    description: str
    parts: list[PlannedPart]
    reads: list[str]  # stages whose parts it reads
    after: list[str]  # stages that it only waits for
    result: dict[str, Any]
    variants: list[StageContent] = field(default_factory=list)  # stages that are drawn as this one

    @property
    def finished(self) -> int:
        """The number of variants, or of parts, that are finished."""
        members: Sequence[StageContent | PlannedPart] = (
            self.variants if len(self.variants) > 1 else self.parts
        )
        return sum(member.state in DONE for member in members)

    @property
    def state(self) -> State:
        states = {part.state for part in self.parts}
        if "gate failed" in states:
            return "gate failed"
        return "finished" if states == {"finished"} else "not run" if states == {"not run"} else "partial"


@dataclass(frozen=True)
class Share:
    source: str
    share: float
    tokens: int | None  # None before the source is built
    passes: float | None  # over the source through this mixture; None where nothing was trained
    passes_in_all: float | None


@dataclass(frozen=True)
class RunContent:
    name: str
    description: str
    store: str
    parameters: int
    stages: list[StageContent]
    boxes: list[StageContent]  # the stages as the graph shows them
    curves: list[Curve]
    mixtures: dict[str, list[Share]]
    evaluations: list[Evaluation]
    agreements: list[Evaluation]  # of rewards with labels
    tokenizers: list[ComparedTokenizers]
    classifiers: list[Classified]
    prompts: list[Prompt]
    answers: dict[str, list[TaskAnswers]]  # to tasks, by part
    experiments: dict[str, Experiment]
    sources: list[SourceFiles]
    planted: list[tuple[str, PlantedRecord]]  # with the names of their corpora
    notes: list[str]

    @property
    def parts(self) -> list[PlannedPart]:
        return [part for stage in self.stages for part in stage.parts]

    @property
    def _stored(self) -> list[PlannedPart]:
        """Parts with something in the store; two names of one artifact count once."""
        stored = [part for part in self.parts if part.step.stored]
        return list({(part.path, part.done_steps): part for part in stored}.values())

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
        every: dict[str, set[str]] = {}
        for part in self.parts:
            for library, version in part.versions.items():
                every.setdefault(library, set()).add(version)
        return {library: sorted(versions) for library, versions in sorted(every.items())}
