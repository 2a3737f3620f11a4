"""The `long_context` stage: a chain of steps to longer sequences, each with its own RoPE base."""

from typing import ClassVar, Literal

from specs.base import identity, reference
from specs.settings import MixtureTraining, Phase
from specs.stages.base import FromCheckpoint
from specs.stages.training import CarryField, TrainingStage, carries
from specs.units import Reference


class LongContextStep(MixtureTraining):
    """One step: usually twice the length, half the batch, and a larger `rope_theta`. The rate is the parent's
    and is held after its warm-up; the optimizer's states are reset by default, as in the released scripts."""

    sequence_length: int = identity(ge=8)
    rope_theta: float = identity(gt=0, description="base of the rotary embedding from this step on")
    carry: CarryField = carries("weights", "data")


class LongContextStage(TrainingStage, FromCheckpoint):
    """The first of `steps` starts from `from`, every other one from the end of the step before it. Their
    results are named `stage/1`, `stage/2`, ...; the stage's name means the last result."""

    VERSION: ClassVar[int] = 1
    kind: Literal["long_context"] = identity()
    steps: list[LongContextStep] = reference(min_length=1)

    def phases(self, name: str) -> list[Phase]:
        parents = [
            self.from_,
            *(Reference(name, part=str(index + 1)) for index in range(len(self.steps) - 1)),
        ]
        return [
            Phase(
                *(f"{name}/{index + 1}", name, ("stages", name, "steps", index), step, parent),
                carry=tuple(step.carry),
                rope_theta=step.rope_theta,
            )
            for index, (step, parent) in enumerate(zip(self.steps, parents, strict=True))
        ]
