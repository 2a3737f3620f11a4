"""fastText classifiers: training, probabilities, and the form in which a text is read.

Invariants: a model is trained by one thread, from lines in a given order, so its bits follow from the lines
and the spec. A probability depends on the text alone.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from apertus_model.classifiers.transformer import ClassifierError, Floats
from apertus_model.data.corpora.language import PREFIX, labels_of
from specs.stages.classifier import FastText


def line(text: str) -> str:
    """A text as one line. Words that fastText would read as labels are left out."""
    return " ".join(word for word in text.split() if not word.startswith(PREFIX))


def train(
    examples: Iterable[tuple[str, str]], spec: FastText, seed: int, scratch: Path, target: Path
) -> None:
    """Trains on pairs of a label and a text, and writes the model to `target`."""
    import fasttext

    lines = scratch / "lines.txt"
    with open(lines, "w", encoding="utf-8") as file:
        for label, text in examples:
            file.write(f"{PREFIX}{label} {line(text)}\n")
    try:
        model = fasttext.train_supervised(
            str(lines),
            dim=spec.dim,
            epoch=spec.epochs,
            lr=spec.lr,
            wordNgrams=spec.word_ngrams,
            minn=spec.shortest_ngram,
            maxn=spec.longest_ngram,
            bucket=spec.buckets,
            minCount=spec.min_count,
            loss="softmax",
            thread=1,
            seed=seed,
            verbose=0,
        )
    except (ValueError, RuntimeError) as error:  # an empty vocabulary, a loss that is not a number
        raise ClassifierError(f"fastText cannot train on these documents: {error}") from error
    finally:
        lines.unlink()
    model.save_model(str(target))


class FastTextModel:
    """A trained model. `labels` have no fastText prefix."""

    def __init__(self, path: Path, name: str) -> None:
        """Opens a file; `name` is for messages. ClassifierError when it is not a fastText model."""
        from fasttext.FastText import _FastText

        try:
            self.labels = sorted(labels_of(path))
            self._model: Any = _FastText(model_path=str(path))
        except (ValueError, MemoryError) as error:
            raise ClassifierError(f"{name} is not a fastText model: {error}") from error

    def probabilities(self, texts: Sequence[str], labels: Sequence[str]) -> Floats:
        """The probabilities of the given labels, as (texts, labels). They are limited to 1, since fastText
        computes in float32, which can end just above 1."""
        columns = {label: index for index, label in enumerate(labels)}
        result = np.zeros((len(texts), len(labels)), np.float32)
        for row, text in enumerate(texts):
            names, values = self._model.predict(line(text), k=-1)
            for name, value in zip(names, values, strict=True):
                if (column := columns.get(name.removeprefix(PREFIX))) is not None:
                    result[row, column] = min(float(value), 1.0)
        return result
