"""One piece of advice, and what the checks look at."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from flows.planning.estimate import Estimates
from flows.planning.graph import Graph
from flows.planning.source_usage import SourceUsage
from specs.advice import CODES
from specs.pipeline import Pipeline
from specs.trajectory import Point, Trajectory


@dataclass(frozen=True)
class Advice:
    """`code` of `specs.advice`, for a stage; `message` says what is the case and what to do, `numbers` are those in it."""

    code: str
    stage: str
    message: str
    numbers: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        assert self.code in CODES, self.code

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
    """A plan, without what is stored."""

    graph: Graph
    pipeline: Pipeline
    usages: list[SourceUsage]
    estimates: Estimates

    def phases(self) -> Iterator[tuple[str, Trajectory]]:
        """The phases that train, in the order of the plan, each with its name; a choice among checkpoints is no training of its own."""
        for name, trajectory in self.graph.trajectories.items():
            if not trajectory.merged and not trajectory.imported and self.kind(trajectory.stage) != "select":
                yield name, trajectory

    def ancestry(self, trajectory: Trajectory) -> Iterator[tuple[Point, Trajectory]]:
        """The trajectories that one descends from, nearest first, with the point at which the next one begins. It ends at new weights, at a
        Hugging Face model and at a merge, whose parents are several."""
        start = trajectory.parent
        while start is not None:
            parent = self.graph.trajectories[start.phase]
            yield start, parent
            start = parent.parent

    def kind(self, stage: str) -> str:
        """Kind of a stage; "" for what is none, such as a Hugging Face model."""
        found = self.pipeline.stages.get(stage)
        return found.kind if found is not None else ""
