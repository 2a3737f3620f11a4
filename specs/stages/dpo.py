"""The `dpo` stage: direct preference optimisation (arXiv 2305.18290)."""

from __future__ import annotations

from typing import ClassVar, Literal

from specs.base import Spec, identity
from specs.stages.preference_training import PreferenceSegment, PreferenceTraining


class DpoLoss(Spec):
    """The loss -ln sigmoid(b_c r_c - b_r r_r) of a pair, where r is the log-ratio to the reference of the
    chosen and of the rejected completion, and b = beta, or beta / |y| if it is normalised by length."""

    beta: float = identity(5.0, gt=0)
    length_normalised: bool = identity(True)
    label_smoothing: float = identity(0.0, neutral=0.0, ge=0, lt=0.5, description="share of swapped pairs")


class DpoStage(PreferenceTraining):
    """Makes the chosen completion more likely than the rejected one."""

    VERSION: ClassVar[int] = 1
    kind: Literal["dpo"] = identity()
    loss: DpoLoss = identity(default_factory=DpoLoss)

    @classmethod
    def segment(cls) -> type[DpoSegment]:
        return DpoSegment


class DpoSegment(PreferenceSegment):
    """A resolved segment of DPO."""

    loss: DpoLoss = identity()

    @property
    def objective(self) -> str:
        return "dpo"
