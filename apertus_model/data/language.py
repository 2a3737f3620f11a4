"""Language identification with a fastText model.

Invariant: the model is the file that the spec names, without other downloads; a label depends on the text
alone. Every worker has a copy of the model in memory.
"""

from __future__ import annotations

import hashlib
from functools import lru_cache
from pathlib import Path
from typing import Any

from apertus_model.files import local_file
from infra.store.inputs import SourceError

PREFIX = "__label__"


class Language:
    """A fastText classifier."""

    def __init__(self, model: Any) -> None:
        self._model = model

    @staticmethod
    def load(url: str, scratch: Path) -> Language:
        """Opens the model once per process; a remote one is copied to `scratch` first. SourceError for
        another file."""
        return _load(url, scratch)

    def identify(self, text: str) -> tuple[str, float]:
        """The most likely label, without fastText's prefix, and its probability."""
        # fastText reads one line; it counts its probabilities in float32, which can end just above 1.
        labels, scores = self._model.predict(" ".join(text.split()), k=1)
        return (labels[0].removeprefix(PREFIX), min(float(scores[0]), 1.0)) if labels else ("", 0.0)


@lru_cache(maxsize=4)
def _load(url: str, scratch: Path) -> Language:
    from fasttext.FastText import _FastText

    path = local_file(url, scratch / f"model-{hashlib.sha256(url.encode()).hexdigest()[:16]}")
    try:
        return Language(_FastText(model_path=str(path)))
    except ValueError as error:
        raise SourceError(f"'{url}' is not a fastText model: {error}") from error
