"""The interface of a reward.

Invariant: a reward is a function of the completions of one prompt: `score` sees all of them together and no
other prompt's, so that values do not depend on how prompts are divided into units.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from specs.errors import StageError


class RewardError(StageError):
    """A reward that cannot be opened, or has no value for a completion. The message names the prompt."""


class TooLongError(RewardError):
    """A prompt and completion that are longer together than the model of a reward may read."""


@dataclass(frozen=True)
class Scored:
    """A completion to score."""

    messages: list[dict[str, Any]]  # the prompt, in the normal form of conversations
    completion: str  # its text, without special tokens
    finished: bool = True  # whether the model ended it; true for an offline completion
    answer: str | None = None  # of the conversation itself
    metadata: dict[str, Any] = field(default_factory=dict)  # of the conversation
    tokens: tuple[int, ...] = ()  # ids of the completion, with the end of the turn if it has one

    def reference(self) -> str:
        """The documented answer: `summary` of the metadata, else the conversation's. RewardError without."""
        reference = self.metadata.get("summary") or self.answer
        if not reference or not str(reference).strip():
            raise RewardError(
                "there is nothing to compare with: neither `summary` in the metadata nor an answer in the"
                " conversation"
            )
        return str(reference)


class Reward(Protocol):
    """An opened reward."""

    def score(self, items: Sequence[Scored]) -> list[float]:
        """A finite value per completion of one prompt; larger is better."""


def plain(content: str | list[dict[str, Any]]) -> str:
    """The text of a message's content in normal form: the content itself, or the texts of its blocks."""
    if isinstance(content, str):
        return content
    return "\n".join(block["text"] for block in content if "text" in block)


def check_vocabulary(name: str, tokenizer: Any, model: Any) -> None:
    """RewardError when a transformers tokenizer has more tokens than its model, `name`, embeds."""
    tokens, embedded = len(tokenizer), model.get_input_embeddings().num_embeddings
    if tokens > embedded:
        raise RewardError(
            f"the tokenizer of the {name} has {tokens:,} tokens, and the model embeds {embedded:,}: it is"
            " that of another model. Fix: use the tokenizer that the model was trained with"
        )
