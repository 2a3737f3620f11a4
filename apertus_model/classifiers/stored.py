"""The file `classifier.json` of a trained classifier: which other files it has, and how it reads a text."""

from __future__ import annotations

from typing import Any, Literal

from specs.base import Strict

NAME = "classifier.json"
MODEL = {"mlp": "model.safetensors", "fasttext": "model.bin"}
ALL = ""
"""Stands for all languages."""


class StoredClassifier(Strict):
    """The description of one trained classifier."""

    method: Literal["mlp", "fasttext"]
    labels: list[str]  # in the order of the outputs
    max_characters: int  # characters of a document that are read
    max_tokens: int | None = None  # tokens that the encoder reads; None for fastText
    precision: Literal["float32", "bfloat16"] | None = None  # of the encoder
    languages: list[str] | None = None  # each has a model; None: there is one model, for `ALL`

    def to_json(self) -> dict[str, Any]:
        """The JSON of the description, without `languages` if it is None."""
        return self.model_dump(mode="json", exclude={"languages"} if self.languages is None else None)

    def file(self, language: str) -> str:
        """The file of a language's model: `model.bin`, or `model-00003.bin` for the fourth language."""
        name = MODEL[self.method]
        return (
            name if self.languages is None else name.replace(".", f"-{self.languages.index(language):05d}.")
        )
