"""The file `classifier.json` of a trained classifier: its other files, and how it reads a document."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

NAME = "classifier.json"
MODEL = {"mlp": "model.safetensors", "fasttext": "model.bin"}
ALL = ""
"""Stands for all languages."""


class StoredClassifier(BaseModel):
    """One trained classifier."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    method: Literal["mlp", "fasttext"]
    labels: list[str]  # in the order of the outputs
    max_characters: int  # of a document that are read
    max_tokens: int | None = None  # that the encoder reads; None for fastText
    precision: Literal["float32", "bfloat16"] | None = None  # of the encoder
    languages: list[str] | None = None  # each has a model; None: there is one model, for `ALL`

    def to_json(self) -> dict[str, Any]:
        """Without `languages` where there are none."""
        return self.model_dump(mode="json", exclude={"languages"} if self.languages is None else None)

    def file(self, language: str) -> str:
        """The file with the model of a language: `model.bin`, or `model-00003.bin` of the fourth language."""
        name = MODEL[self.method]
        return (
            name if self.languages is None else name.replace(".", f"-{self.languages.index(language):05d}.")
        )
