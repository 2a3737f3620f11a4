"""What a reward is given and what it gives.

Invariant: a reward is a function of the completions of one prompt: `score` sees all of them together and no other prompt's, so that values
do not depend on how prompts are divided into units.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from specs.errors import StageError


class RewardError(StageError):
    """A reward that cannot be opened, or has no value for a completion. The message names the prompt."""


@dataclass(frozen=True)
class Scored:
    """A completion to score.

    Attributes:
        messages: the prompt, in the normal form of conversations.
        completion: its text, without special tokens.
        finished: whether the model ended by itself; true for a completion that came with the prompt.
        answer: what the conversation itself answers, or None.
        metadata: of the conversation.
        tokens: ids of the completion, with the end of the turn where it has one.
    """

    messages: list[dict[str, Any]]
    completion: str
    finished: bool = True
    answer: str | None = None
    metadata: dict[str, Any] = field(default_factory=dict)
    tokens: tuple[int, ...] = ()

    def reference(self) -> str:
        """What is documented: `summary` of the metadata, else the conversation's own answer. RewardError when there is neither."""
        reference = self.metadata.get("summary") or self.answer
        if not reference or not str(reference).strip():
            raise RewardError("there is nothing to compare with: neither `summary` in the metadata nor an answer in the conversation")
        return str(reference)


class Reward(Protocol):
    """An opened reward."""

    def score(self, items: Sequence[Scored]) -> list[float]:
        """A finite value per completion of one prompt; larger is better."""
