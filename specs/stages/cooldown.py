"""The `cooldown` stage: annealing from any checkpoint, by default with 1-sqrt decay to 0.1 of the rate at the
branch point."""

from typing import ClassVar, Literal

from specs.base import identity
from specs.schedule import Decay, ScheduleSpec
from specs.settings import MixtureTraining
from specs.stages.training import CarryField, FromParent, carries
from specs.units import OrRest


class CooldownSchedule(ScheduleSpec):
    """A schedule that decays by default (WSO: `decay: none`)."""

    decay: Decay = identity("1-sqrt")


class CooldownStage(FromParent, MixtureTraining):
    """Continues from any checkpoint, with another schedule and another mixture."""

    VERSION: ClassVar[int] = 1
    kind: Literal["cooldown"] = identity()
    carry: CarryField = carries("weights", "optimizer", "data")
    schedule: OrRest[CooldownSchedule] = identity(default_factory=CooldownSchedule)
