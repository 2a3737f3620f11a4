"""The `conversations` stage: dialogues, split into training and held-out ones, rendered by the chat
template and tokenised; one part per source."""

from __future__ import annotations

from typing import ClassVar, Literal

from specs.base import Spec, execution, identity, reference
from specs.stages.base import SourcePart, Stage
from specs.units import Reference


class ConversationSource(Spec):
    """How one source is processed."""

    holdout: float = identity(
        0.02,
        gt=0,
        lt=1,
        description="share kept out of training; conversations with the same `group` stay together",
    )


class ConversationsStage(Stage):
    """Conversations for the training of `sft`, the prompts of `preference_data`, the pairs of `reward_model`
    and the questions of `evaluate`."""

    VERSION: ClassVar[int] = 2
    kind: Literal["conversations"] = identity()
    tokenizer: Reference = reference(to="tokenizer")
    sources: dict[str, ConversationSource] = reference(
        min_length=1,
        description=(
            "names of the pipeline's `sources:`, of a conversational format, and how each is processed"
        ),
    )
    seed: int = identity(28)
    files_per_task: int = execution(50, ge=1, description="input files per restartable task")


class ConversationsPart(SourcePart):
    """Resolved, for one source."""

    process: ConversationSource = identity()
