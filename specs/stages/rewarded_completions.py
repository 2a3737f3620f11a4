"""The `rewarded_completions` stage: completions whose rewards are known, for training without pairs."""

from __future__ import annotations

from typing import ClassVar, Literal

from specs.base import execution, identity, reference
from specs.stages.base import DifferentReferences, Part
from specs.stages.preference_data import PreferenceSet


class RewardedCompletionsStage(PreferenceSet):
    """Completions with rewards that the data bring, each by itself, for `qrpo`. A row has a prompt, one
    completion or several with their rewards, and the same reward of completions that the model of `from`
    sampled for the prompt: the quantile is taken among those."""

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
        None, ge=2, description="of prompt and completion; sequence_length by default; longer are dropped"
    )


class RewardedCompletionsPart(Part):
    """Resolved. Inputs: `conversations:<i>`, `tokenizer`. Completions as tokens, with their quantiles."""

    WORKERS: ClassVar[int] = 1
    reward: str = identity()
    reference_rewards: str = identity()
    max_tokens: int = identity(description="of prompt and completion")
    completions_per_unit: int = execution(1024, description="conversations per restartable unit of work")
