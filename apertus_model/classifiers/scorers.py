"""Scorers, which give documents the probability of a label: a trained classifier (`classifier.json`), a
Hugging Face folder, or a fastText file.

Invariant: a score depends on the text, its language if each language has a model, and the model. It is a
float32.
"""

from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from apertus_model.classifiers import perceptron
from apertus_model.classifiers.fast_text import FastTextModel
from apertus_model.classifiers.measures import ALL
from apertus_model.classifiers.transformer import ClassifierError, Floats, Transformer
from apertus_model.files import copy_folder, local_file
from infra.store import Artifact
from infra.store.documents import check
from specs.base import Strict
from specs.errors import some_of
from specs.rewards import CLASSIFIER_FILES
from specs.scoring import CHARACTERS_PER_TOKEN, FASTTEXT_CHARACTERS
from specs.stages.classifier import Encoder, ScoresPart

NAME = "classifier.json"
MODEL = {"mlp": "model.safetensors", "fasttext": "model.bin"}


class StoredClassifier(Strict):
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


class Scorer(NamedTuple):
    """A scorer of texts that are cut to `characters`, and given with their languages."""

    characters: int
    scores: Callable[[Sequence[str], Sequence[str]], Floats]
    languages: frozenset[str] | None = None  # languages that it has models for; None: any language


def open_encoder(spec: Encoder, scratch: Path) -> Transformer:
    """Copies the folder of an encoder to `scratch` and loads it. ClassifierError when it cannot be opened."""
    folder = copy_folder(spec.encoder, scratch / "encoder", CLASSIFIER_FILES)
    return Transformer(folder, f"encoder {spec.encoder}", "AutoModel", spec.max_tokens, spec.precision)


def open_scorer(part: ScoresPart, classifier: Artifact | None, scratch: Path) -> Scorer:
    """The scorer of a part, by the artifact of a stage or a model. ClassifierError without the label."""
    if classifier is not None:
        return _trained(part, classifier, scratch)
    assert part.url is not None, "the plan states it"
    if part.method == "fasttext":
        words = FastTextModel(local_file(part.url, scratch / "model.bin"), part.url)
        _index(part, words.labels, part.url)
        return Scorer(
            FASTTEXT_CHARACTERS, lambda texts, languages: words.probabilities(texts, [part.label])[:, 0]
        )
    folder = copy_folder(part.url, scratch / "classifier", CLASSIFIER_FILES)
    model = Transformer(
        folder, f"classifier {part.url}", "AutoModelForSequenceClassification", part.max_tokens
    )
    config = model.config
    index = int([*config.id2label][_index(part, [*map(str, config.id2label.values())], part.url)])

    def scores(texts: Sequence[str], languages: Sequence[str]) -> Floats:
        logits = model.logits(texts)
        if config.problem_type == "regression":
            return logits[:, index]
        if config.problem_type == "multi_label_classification" or config.num_labels == 1:
            return (1 / (1 + np.exp(-logits[:, index].astype(np.float64)))).astype(np.float32)
        return softmax(logits)[:, index]

    return Scorer(CHARACTERS_PER_TOKEN * part.max_tokens, scores)


def softmax(logits: Floats) -> Floats:
    """The softmax of each row, computed in float64."""
    powers = np.exp(logits.astype(np.float64) - logits.max(1, keepdims=True))
    return (powers / powers.sum(1, keepdims=True)).astype(np.float32)


def _trained(part: ScoresPart, artifact: Artifact, scratch: Path) -> Scorer:
    stored = check(StoredClassifier, artifact.json(NAME), f"{NAME} of {artifact.path}")
    index = _index(part, stored.labels, artifact.path)
    encoder: Transformer | None = None
    if stored.max_tokens is not None and stored.precision is not None:
        assert part.url is not None, "the plan states the encoder"
        spec = Encoder(encoder=part.url, max_tokens=stored.max_tokens, precision=stored.precision)
        encoder = open_encoder(spec, scratch)

    @cache
    def model(language: str) -> Callable[[Any], Floats]:
        """A language's function from texts, or their embeddings, to the probability of the label."""
        path = artifact.local(stored.file(language))
        if encoder is None:
            words = FastTextModel(path, artifact.path)
            return lambda texts: words.probabilities(texts, [part.label])[:, 0]
        layers = perceptron.load(path)
        return lambda embeddings: perceptron.probabilities(layers, embeddings)[:, index]

    def scores(texts: Sequence[str], languages: Sequence[str]) -> Floats:
        content = np.array(texts, object) if encoder is None else encoder.embeddings(texts)
        if stored.languages is None:
            return model(ALL)(content)
        values, of = np.empty(len(texts), np.float32), np.array(languages)
        for language in sorted(set(languages)):
            values[of == language] = model(language)(content[of == language])
        return values

    if stored.languages is None:
        model(ALL)
    known = frozenset(stored.languages) if stored.languages is not None else None
    return Scorer(stored.max_characters, scores, known)


def _index(part: ScoresPart, labels: Sequence[str], name: str) -> int:
    """The place of the part's label among those of a model."""
    if part.label not in labels:
        raise ClassifierError(f"{name} has no label '{part.label}'. Fix: use one of {some_of(labels, 10)}")
    return labels.index(part.label)
