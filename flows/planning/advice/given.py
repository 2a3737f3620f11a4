"""One piece of advice, and the input of the checks."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from flows.planning.estimate import Estimates
from flows.planning.graph import Graph
from flows.planning.source_usage import SourceUsage
from specs.advice import CODES
from specs.pipeline import Pipeline
from specs.settings import Phase
from specs.trajectory import Point, Trajectory, phases


@dataclass(frozen=True)
class Advice:
    """One piece of advice for a stage."""

    code: str  # of `specs.advice`
    stage: str
    message: str  # the finding, and what to do
    numbers: dict[str, Any] = field(default_factory=dict)  # those in the message, by name

    def __post_init__(self) -> None:
        assert self.code in CODES, self.code

    @property
    def silenced_by(self) -> set[tuple[str, str]]:
        """The stages under which a recipe can silence it, with its code; "" for all stages."""
        return {(self.stage, self.code), ("", self.code)}

    def to_json(self) -> dict[str, Any]:
        about = CODES[self.code]
        return {
            "code": self.code,
            "stage": self.stage,
            "message": self.message,
            "numbers": self.numbers,
            "reason": about.reason,
            "source": about.source,
        }


@dataclass(frozen=True)
class Context:
    """A plan, without stored results."""

    graph: Graph
    pipeline: Pipeline
    usages: list[SourceUsage]
    estimates: Estimates

    def phases(self) -> Iterator[tuple[str, Trajectory]]:
        """The phases that train, with their names, in the order of the plan."""
        for name, trajectory in self.graph.trajectories.items():
            if trajectory.trains:
                yield name, trajectory

    def stated_phases(self) -> Iterator[tuple[Phase, Trajectory]]:
        """The phases as the recipe states them, with their trajectories, in the order of the recipe."""
        for stage in self.pipeline.stages:
            for phase in phases(self.pipeline, stage):
                if (trajectory := self.graph.trajectories.get(phase.name)) is not None:
                    yield phase, trajectory

    def ancestry(self, trajectory: Trajectory) -> Iterator[tuple[Point, Trajectory]]:
        """The trajectories from which a trajectory descends, nearest first, each with the point at which the
        next one begins. The chain ends at new weights, at a Hugging Face model, and at a merge, which has
        several parents."""
        start = trajectory.parent
        while start is not None:
            parent = self.graph.trajectories[start.phase]
            yield start, parent
            start = parent.parent

    def kind(self, stage: str) -> str:
        """The kind of a stage; "" for any other name, such as that of a Hugging Face model."""
        named = self.pipeline.stages.get(stage)
        return named.kind if named is not None else ""
