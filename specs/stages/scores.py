"""The `scores` part of a corpus or of conversations: the scores of one source by one model, for a filter."""

from __future__ import annotations

from typing import ClassVar, Literal

from specs.base import execution, identity, option
from specs.launch import HeldModel
from specs.scoring import TOKENS, Label
from specs.stages.base import DocumentsPart


class ScoresPart(DocumentsPart):
    """The resolved scores. Inputs: `documents`; for a classifier stage `classifier` and, with embeddings,
    `encoder` (documents outside the store); else `model` (documents outside the store)."""

    VERSION: ClassVar[int] = 2
    WORKERS: ClassVar[int] = 1
    of: Literal["conversation", "answer"] = option(
        "conversation", description="in conversations: the text that is scored"
    )
    method: Literal["fasttext", "mlp", "sequence-classifier"] = identity()
    label: Label = identity()
    language_column: str | None = option(
        None, description="column that selects the model of a classifier with one model for each language"
    )
    max_tokens: int = option(
        TOKENS, description="maximum tokens that a Hugging Face sequence classifier reads"
    )
    url: str | None = execution(
        None, description="URL of the encoder or the model; None: the stage's fastText file"
    )

    @property
    def held_model(self) -> HeldModel | None:
        role = {"fasttext": None, "mlp": "encoder", "sequence-classifier": "model"}[self.method]
        return HeldModel(role) if role is not None else None
