"""The file `classifier.json` of a trained classifier: what its other file is, and how a document is read."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict

NAME = "classifier.json"
MODEL = {"mlp": "model.safetensors", "fasttext": "model.bin"}


class StoredClassifier(BaseModel):
    """One trained classifier."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    method: Literal["mlp", "fasttext"]
    labels: list[str]  # in the order of the outputs
    max_characters: int  # of a document that are read
    max_tokens: int | None = None  # that the encoder reads; None for fastText
    precision: Literal["float32", "bfloat16"] | None = None  # of the encoder
