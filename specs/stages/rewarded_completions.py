"""The `rewarded_completions` stage: completions whose rewards are known, for training without pairs."""

from typing import ClassVar, Literal

from specs.base import execution, identity, reference
from specs.stages.base import DifferentReferences, Part
from specs.stages.preference_data import PreferenceSet


class RewardedCompletionsStage(PreferenceSet):
    """Single completions whose rewards are in the data, for `qrpo`. A row has a prompt, one or several
    completions with their rewards, and the rewards, by the same measure, of completions that the model of
    `from` sampled for the prompt: quantiles are taken among the latter."""

    VERSION: ClassVar[int] = 1
    kind: Literal["rewarded_completions"] = identity()
    completions: DifferentReferences = reference(
        min_length=1,
        to="conversations",
        description="training splits of parts of `conversations` stages",
    )
    reward: str = identity(
        "reward", description="column with the reward, or with a list, one for each of `completions`"
    )
    reference_rewards: str = identity(
        "reference_rewards", description="column with the rewards of the model's completions, two or more"
    )
    max_tokens: int | None = identity(
        None,
        ge=2,
        description="maximum tokens of prompt and completion; by default sequence_length; longer are dropped",
    )


class RewardedCompletionsPart(Part):
    """The resolved completions as tokens, with their quantiles. Inputs: `conversations:<i>`, `tokenizer`."""

    WORKERS: ClassVar[int] = 1
    reward: str = identity()
    reference_rewards: str = identity()
    max_tokens: int = identity(description="maximum tokens of prompt and completion")
    completions_per_unit: int = execution(1024, description="conversations per restartable unit of work")
