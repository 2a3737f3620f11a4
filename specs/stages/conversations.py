"""The `conversations` stage: dialogues, filtered, split into training and held-out ones, rendered by the chat
template and tokenised; one part per source.

`share` and `count` choose among the conversations of a source that are left after the filters and without
repeated contents; the chosen ones are split."""

from collections.abc import Iterator
from typing import ClassVar, Literal

from pydantic import field_validator

from specs.base import Spec, execution, identity, option, reference
from specs.errors import FieldPath
from specs.filters import FilterSpec, a_column_for_each_score
from specs.personal_data import PersonalDataField, Pii, replaced_kinds, replaced_only
from specs.stages.base import SourcePart, Stage
from specs.units import Count, Reference

CONTROL_COLUMNS = (
    *("messages", "conversations", "prompt", "completion", "completions", "chosen", "rejected"),
    *("rejected_response", "instruction", "input", "output", "system", "system_prompt", "history"),
    *("tools", "functions", "chat_template_kwargs", "id", "group"),
)
"""Columns of a row that make up the conversation; filters read the others."""


class ConversationSource(Spec):
    """The processing of one source: filters, then personal data, then the choice of `share` or `count`, then
    the held-out split."""

    filters: list[FilterSpec] = option(
        default_factory=list,
        description="applied in this order; a filter reads the columns of a row that are not part of the"
        " conversation",
    )
    pii: PersonalDataField = option(
        False,
        description="personal data to replace by fixed placeholders, as in a corpus, after the filters: in"
        " the texts of messages, in values of the arguments of tool calls and in outputs of tools. Names and"
        " schemas of tools, keys of arguments, and further columns of a row stay as they are",
    )
    share: float | None = option(
        None,
        gt=0,
        le=1,
        description="share of the source, chosen by a hash of seed and content: a higher share keeps the"
        " same conversations and more",
    )
    count: Count | None = option(
        None,
        ge=1,
        description="number of conversations (20k), those with the smallest hashes of seed and content: a"
        " higher count keeps the same ones and more; all where there are fewer",
    )
    holdout: float = identity(
        0.02,
        ge=0,
        lt=1,
        description="share kept out of training; conversations with the same `group` stay together. 0 holds"
        " out none",
    )

    @field_validator("filters")
    @classmethod
    def _a_column_for_each_score(cls, filters: list[FilterSpec]) -> list[FilterSpec]:
        return a_column_for_each_score(filters)

    def conflicts(self) -> Iterator[str]:
        if self.share is not None and self.count is not None:
            yield "share and count both say how much of the source is kept; set one"

    @property
    def replaced(self) -> tuple[Pii, ...]:
        return replaced_kinds(self.pii)

    @property
    def replaced_only(self) -> dict[str, list[str]]:
        return replaced_only(self.pii)


class ConversationsStage(Stage):
    """Conversations for the training of `sft`, the prompts of `preference_data`, the pairs of `reward_model`
    and the questions of `evaluate`."""

    VERSION: ClassVar[int] = 6
    READS: ClassVar[Literal["text", "conversations"]] = "conversations"
    PART_PER_SOURCE: ClassVar[bool] = True
    kind: Literal["conversations"] = identity()
    tokenizer: Reference = reference(to="tokenizer")
    sources: dict[str, ConversationSource] = reference(
        min_length=1,
        description="names of the pipeline's `sources:`, of a conversational format, and how each is"
        " processed",
    )
    seed: int = identity(28)
    files_per_task: int = execution(50, ge=1, description="input files per restartable task")

    def source_fields(self) -> dict[str, FieldPath]:
        return {source: ("sources", source) for source in self.sources}


class ConversationsPart(SourcePart):
    """The resolved part of one source. Further inputs are `filter:<step>:<file>` for the files that filters
    read, `scores:<step>` for the scores of a model, and `not_in:<step>:<i>` for the parts whose conversations
    count as seen."""

    PLAN_DEPENDS: ClassVar[bool] = True
    process: ConversationSource = identity()
