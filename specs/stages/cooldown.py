"""The `cooldown` stage: annealing from any checkpoint, by default 1-sqrt to 0.1 of the rate at the branch point."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import model_validator

from specs.base import identity, reference
from specs.schedule import Decay, ScheduleSpec
from specs.stages.training import Carry, TrainingStage
from specs.units import Reference


class CooldownSchedule(ScheduleSpec):
    """A schedule that decays unless it is told not to (WSO: `decay: none`)."""

    decay: Decay = identity("1-sqrt")


class CooldownStage(TrainingStage):
    """`carry` says what goes over from the parent: weights always; the optimizer's states; `data`: samples already drawn from
    the same mixture are not drawn again."""

    VERSION: ClassVar[int] = 1
    kind: Literal["cooldown"] = identity()
    from_: Reference = reference(alias="from")
    carry: list[Carry] = identity(default_factory=lambda: ["weights", "optimizer", "data"])
    schedule: CooldownSchedule = identity(default_factory=CooldownSchedule)

    @model_validator(mode="after")
    def _carries_weights(self) -> CooldownStage:
        if "weights" not in self.carry:
            raise ValueError("a stage that starts from a checkpoint carries its weights; add weights to carry")
        return self
