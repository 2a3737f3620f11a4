"""The `dpo` stage: direct preference optimisation (arXiv 2305.18290)."""

from collections.abc import Iterator
from typing import ClassVar, Literal

from specs.base import Spec, identity, option, reference
from specs.stages.base import DifferentReferences
from specs.stages.preference_training import PreferenceSegment, PreferenceTraining, preference_sets
from specs.stages.sft import Repeats


class DpoLoss(Spec):
    """The loss -ln sigmoid(b_c r_c - b_r r_r) of a pair, where r is the log-ratio to the reference of the
    chosen and of the rejected completion, and b = beta, or beta / |y| if it is normalised by length."""

    beta: float = identity(5.0, gt=0)
    length_normalised: bool = identity(True)
    label_smoothing: float = option(0.0, ge=0, lt=0.5, description="share of swapped pairs")


class DpoSegment(PreferenceSegment):
    """A resolved segment of DPO."""

    OBJECTIVE: ClassVar[str] = "dpo"
    loss: DpoLoss = identity()


class DpoStage(PreferenceTraining):
    """Makes the chosen completion more likely than the rejected one. Trains on preference data, or on the
    pairs of a file as they are (`pairs`), whose log-probabilities under the model of `from` it computes
    first."""

    VERSION: ClassVar[int] = 1
    SEGMENT = DpoSegment
    kind: Literal["dpo"] = identity()
    preferences: Repeats = preference_sets("preference_data", default_factory=dict)
    pairs: DifferentReferences = reference(
        default_factory=list,
        to="conversations",
        description="in place of `preferences`: parts of `conversations` stages whose rows have `chosen` and"
        " `rejected`. A pair is dropped, and counted, if both of its completions with their prompts do not"
        " fit into a sequence together, or if they are equal",
    )
    loss: DpoLoss = identity(default_factory=DpoLoss)

    def conflicts(self) -> Iterator[str]:
        if bool(self.preferences) == bool(self.pairs):
            yield "dpo trains on preferences, or on pairs of a file; set preferences or pairs"

    @property
    def trains_on(self) -> str:
        return "pairs with reference" if self.pairs else super().trains_on
