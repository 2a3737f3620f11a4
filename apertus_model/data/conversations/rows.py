"""Rows that a part makes of the conversations among its inputs, `conversations:<i>`.

Invariant: a row depends on its conversation and the spec, so the division into units changes nothing.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any, NamedTuple

from apertus_model.chat.encoder import ChatEncoder
from apertus_model.data.conversations.stored import Conversation, ConversationShards
from apertus_model.data.rows import Row, write_unit
from apertus_model.data.tokens.stream import Split
from apertus_model.tokenizer_files import open_tokenizer
from apertus_model.work.units import Result, Span, units_of
from infra.store import Attempt

COPIED_FACTS = ("tokenizer", "vocab_size", "bos_id", "eos_id", "pad_id", "end_of_turn_id")


class ConversationRange(NamedTuple):
    """The conversations of a unit."""

    input: int  # number of the input
    split: Split
    shards: ConversationShards
    span: Span


class ConversationRows(ABC):
    """Work that makes a row of each conversation. A unit is a range of those of one input and one split."""

    def __init__(self, attempt: Attempt) -> None:
        self._attempt = attempt
        self.units: dict[str, ConversationRange] = {}

    def _add_units(self, name: str, split: Split, per_unit: int, most: int | None = None) -> None:
        """Adds the units of a split of every input. `name`: that of the units, before the number of the
        input; `most`: the number of conversations that are read of each input."""
        for number in range(sum(role.startswith("conversations:") for role in self._attempt.job.inputs)):
            shards = ConversationShards(self._attempt.input_artifact(f"conversations:{number}"), split)
            spans = units_of(f"{name}-{number}", min(len(shards), most or len(shards)), per_unit)
            self.units |= {key: ConversationRange(number, split, shards, span) for key, span in spans.items()}

    def run(self, key: str) -> Result:
        unit = self.units[key]
        rows = (self._row(conversation, unit.input) for conversation in self._conversations(unit))
        return write_unit(unit.span, rows, self._attempt.workdir / f"{key}.jsonl")

    def _conversations(self, unit: ConversationRange) -> Iterator[Conversation]:
        return map(unit.shards.conversation, range(*unit.span))

    @abstractmethod
    def _row(self, conversation: Conversation, number: int) -> Row:
        """The row of a conversation; `number`: that of its input."""


class EncodedConversations(ConversationRows):
    """The same, with the chat format of the input `tokenizer`."""

    def __init__(self, attempt: Attempt) -> None:
        super().__init__(attempt)
        self._tokenizer = open_tokenizer(attempt.input_artifact("tokenizer").local("tokenizer.json"))
        self._encoder = ChatEncoder(self._tokenizer)


def tokenizer_facts(attempt: Attempt) -> dict[str, Any]:
    """The facts about the tokenizer of the conversations. An imported tokenizer may have no padding token;
    padding is masked everywhere, so any token can stand for it."""
    facts = attempt.input_artifact("conversations:0").manifest.facts
    pad_id = facts["pad_id"] if facts["pad_id"] is not None else facts["eos_id"]
    return {name: facts[name] for name in COPIED_FACTS} | {"pad_id": pad_id}


def is_number(value: Any) -> bool:
    """Whether the value of a column is a finite number."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
