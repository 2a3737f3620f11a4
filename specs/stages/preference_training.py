"""Training on pairs of completions: the base classes of all such kinds, and those of `qrpo` and `dpo`, which
train against a reference model.

A sample is a packed sequence of pairs; both completions of a pair lie in the same one. The batch counts
packed sequences.
"""

from typing import Any, ClassVar, Literal

from specs.base import execution, identity, option, reference
from specs.settings import Precision, Settings, Training
from specs.stages.base import Part
from specs.stages.sft import LinearSchedule, Repeat, Repeats
from specs.stages.training import CarryField, FromParent, Segment, carries
from specs.units import OrRest

RepeatedPrompts = Literal["error", "first"]


def preference_sets(*results: str, **options: Any) -> Any:
    """A field that names the sets to train on. `results`: those of their stages."""
    return reference(
        min_length=1,
        **options,
        to=results,
        description="a stage with preference data, or several, each with its own prompts, rewards and rule;"
        " a map gives how often each is seen per epoch: {standard: 1, controversial: 2.5}. Of a fraction,"
        " each epoch has another part",
    )


class PairTraining(FromParent, Training):
    """Training on pairs of completions."""

    CHAT = True
    data_seed: int = option(28, description="seed of the order of the sequences")
    schedule: OrRest[LinearSchedule] = identity(default_factory=LinearSchedule)


class PreferenceTraining(PairTraining):
    """Training against a reference model: `from`, with which the preference data were made. The stages of the
    data also decide the sequence length."""

    TRAINS_ON: ClassVar[str] = "preferences"
    carry: CarryField = carries("weights")
    preferences: Repeats = preference_sets("preference_data")
    repeated_prompts: RepeatedPrompts = identity(
        "error", description="whether a prompt of several sets is an error, or is kept in the first of them"
    )

    def inherited(self, parent: Settings) -> Settings:
        """Log-ratios to a reference are not computed in float8, even if the parent is."""
        precision = Precision(param=parent.precision.param)
        return super().inherited(parent).model_copy(update={"precision": precision})

    def obstacle(self, to: Literal["pp", "tp", "cp", "float8"]) -> str:
        if to == "float8":
            return "a log-ratio would not begin at zero, since scales depend on the rows of a batch"
        return super().obstacle(to)


class DistinctPromptsPart(Part):
    """The resolved choice of the pairs of each set that are trained on. Inputs: `pairs:<i>`, in the order of
    the sets."""

    VERSION: ClassVar[int] = 1
    repeated_prompts: RepeatedPrompts = identity()
    names: list[str] = execution(description="names of the sets, for messages")


class PreferenceSegment(Segment):
    """A resolved segment. Inputs: `pairs`, `log_probabilities`, `tokenizer`, `parent`; for several sets
    `pairs:<i>`, `log_probabilities:<i>` and `distinct_prompts`."""

    DATA_CLASS: ClassVar[str] = "PreferenceData"
    data_seed: int = option(28)
    repeats: list[Repeat] = identity(
        default_factory=lambda: [1], neutral=[1], description="repeats in the order of the inputs"
    )
