"""Language identification with a fastText model.

Invariants: the model is the file that the spec names, and nothing else is downloaded; a label depends on the
text alone. Every worker has a copy of the model in memory.
"""

from __future__ import annotations

import hashlib
import mmap
import struct
from difflib import get_close_matches
from functools import lru_cache
from pathlib import Path
from typing import Any

from apertus_model.files import local_file
from infra.store.inputs import SourceError
from specs.filters import LanguageFilter

PREFIX = "__label__"
MAGIC = 793712314
_HEAD = struct.Struct("<2i 12i d 3i 2q")  # magic, version; settings; sizes of the dictionary
_ENTRY = struct.Struct("<q b")  # count and type, after each word and label
_PRUNED = struct.Struct("<2i")  # an n-gram that is kept, and its place
_MATRIX = struct.Struct("<2q")  # rows and columns, before float32
_QUANTISED = struct.Struct("<? 2q i")  # whether norms are apart; rows, columns; bytes of the codes after it
_QUANTISER = struct.Struct("<4i")  # dimensions and how they are divided, before the centroids in float32
CENTROIDS = 256
_LABEL = 1


class LanguageIdentifier:
    """A fastText classifier."""

    def __init__(self, model: Any, labels: frozenset[str]) -> None:
        self._model = model
        self.labels = labels

    @staticmethod
    def load(spec: LanguageFilter, scratch: Path) -> LanguageIdentifier:
        """Opens the model once per process; a remote one is copied to `scratch` first. SourceError for a
        file that is not a model, and for a label in the spec that the model does not have."""
        language = _load(spec.model, scratch)
        named = {*spec.min_scores, *(spec.languages if spec.languages != "all" else ())}
        if unknown := sorted(named - language.labels):
            labels = sorted(language.labels)
            like = [*get_close_matches(unknown[0], labels, n=1), *labels, "none"][0]
            raise SourceError(
                f"'{spec.model}' has {len(labels)} labels, and none is '{unknown[0]}'."
                f" Fix: correct languages or min_scores; there is '{like}'"
            )
        return language

    def identify(self, text: str) -> tuple[str, float]:
        """The most likely label, without fastText's prefix, and its probability."""
        # fastText reads one line; it computes probabilities in float32, which can end up just above 1.
        labels, scores = self._model.predict(" ".join(text.split()), k=1)
        return (labels[0].removeprefix(PREFIX), min(float(scores[0]), 1.0)) if labels else ("", 0.0)


@lru_cache(maxsize=4)
def _load(url: str, scratch: Path) -> LanguageIdentifier:
    from fasttext.FastText import _FastText

    path = local_file(url, scratch / f"model-{hashlib.sha256(url.encode()).hexdigest()[:16]}")
    try:
        labels = labels_of(path)
        return LanguageIdentifier(_FastText(model_path=str(path)), labels)
    except (ValueError, MemoryError) as error:
        raise SourceError(f"'{url}' is not a fastText model: {error}") from error


def labels_of(path: Path) -> frozenset[str]:
    """The labels of a model, without fastText's prefix. ValueError for a file that is not a model, or is cut
    off: fastText would read a dictionary on until memory is full, and the matrices after it as if whole."""
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        if len(data) < _HEAD.size or _HEAD.unpack_from(data)[0] != MAGIC:
            raise ValueError("it does not begin like one")
        head, position, labels = _HEAD.unpack_from(data), _HEAD.size, []
        for _ in range(head[15]):
            end = data.find(b"\0", position)
            if end < 0 or end + 1 + _ENTRY.size > len(data):
                raise ValueError("its dictionary is cut off")
            if _ENTRY.unpack_from(data, end + 1)[1] == _LABEL:
                labels.append(data[position:end].decode(errors="replace").removeprefix(PREFIX))
            position = end + 1 + _ENTRY.size
        position += _PRUNED.size * max(0, head[19])
        try:
            input_quantised = data[position : position + 1] == b"\1"
            position = _end_of_matrix(data, position + 1, input_quantised)
            output_quantised = input_quantised and data[position : position + 1] == b"\1"
            position = _end_of_matrix(data, position + 1, output_quantised)
        except struct.error:
            position = len(data) + 1
        if position > len(data):
            raise ValueError("its matrices are cut off")
    return frozenset(labels)


def _end_of_matrix(data: mmap.mmap, position: int, quantised: bool) -> int:
    """The place after a matrix. struct.error if its sizes lie beyond the data."""
    if not quantised:
        rows, columns = _MATRIX.unpack_from(data, position)
        return position + _MATRIX.size + 4 * rows * columns
    with_norms, rows, _, codes = _QUANTISED.unpack_from(data, position)
    position = _end_of_quantiser(data, position + _QUANTISED.size + codes)
    return _end_of_quantiser(data, position + rows) if with_norms else position


def _end_of_quantiser(data: mmap.mmap, position: int) -> int:
    return position + _QUANTISER.size + 4 * CENTROIDS * _QUANTISER.unpack_from(data, position)[0]
