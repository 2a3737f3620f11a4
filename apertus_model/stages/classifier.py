"""The `classifier` stage: a classifier of documents, trained on the features of labelled sources.

Artifact: `classifier.json` (`StoredClassifier`), and `model.safetensors` (mlp) or `model.bin` (fastText's own
format); if each language has a model, `model-00000.safetensors`, .... The facts hold the thresholds by label,
language ("" for all) and percentile.

Invariants:
- The training and held-out documents, and their order, depend on hashes of the texts and on the seed, not on
  the order of sources, files or units. Equal texts are in the same split. A text that occurs twice with the
  same label counts once.
- Fewer than two classes, or a class without training or held-out documents (in any language, if each language
  has a model), is an error.

Memory: all texts or embeddings are held at once; a million embeddings of 768 numbers take 3 GB.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet
from numpy.typing import NDArray

from apertus_model.classifiers import fast_text, perceptron
from apertus_model.classifiers.fast_text import FastTextModel
from apertus_model.classifiers.measures import ALL, Thresholds, measure, thresholds
from apertus_model.classifiers.scorers import NAME, StoredClassifier
from apertus_model.classifiers.transformer import ClassifierError, Floats
from apertus_model.data.order.permutation import mix_array
from apertus_model.progress import Progress
from apertus_model.stop import StopSignal
from apertus_model.trainer.process import prepare_process
from infra.store import Artifact, Attempt
from specs.scoring import CHARACTERS_PER_TOKEN
from specs.stages.classifier import ClassifierPart, FastText

DRAWN, HELD_OUT = 1, 2  # purposes of `LabelledDocuments.drawn`


def run(attempt: Attempt, progress: Progress, stop: StopSignal) -> None:
    """Runs the stage. ClassifierError when no classifier can be learned from the documents."""
    part = ClassifierPart.model_validate(attempt.job.spec)
    prepare_process(attempt.job.launch.cpu_threads)
    documents = LabelledDocuments.labelled(
        [attempt.input_artifact(f"source:{index}") for index in range(len(part.labels))], part.labels
    )
    names = sorted(set(documents.labels.tolist()))
    if len(names) < 2:
        raise ClassifierError(
            f"all documents have the label {names[0]}; a classifier needs a second one. Fix: add a source,"
            " or the right label_column"
        )
    stored = _stored(part, names, documents)
    languages = stored.languages or [ALL]
    splits = [_split(part, documents, language, names) for language in languages]
    held_out, train = (documents[np.sort(np.concatenate(both))] for both in zip(*splits, strict=True))
    progress.log(f"{len(train)} training documents, {len(held_out)} held out, labels {', '.join(names)}")
    models: dict[str, Model] = {}
    for language in languages:
        path = attempt.workdir / stored.file(language)
        models[language] = _train(part, train.only(language), names, path, progress)
        attempt.put(path, path.name)
    probabilities = _probabilities(models, held_out, names)
    metrics = measure(probabilities, held_out.numbers(names), names)
    if stored.languages is not None:
        metrics["languages"] = {
            language: _numbers(measure(probabilities[own], held_out.numbers(names)[own], names))
            for language, own in ((language, held_out.of(language)) for language in languages)
        }
    reference, scored = held_out, probabilities
    if "reference" in attempt.job.inputs:
        reference = LabelledDocuments.open(attempt.input_artifact("reference"), None)
        if stored.languages is not None:
            reference = reference[np.flatnonzero(np.isin(reference.languages, stored.languages))]
        if not len(reference):
            raise ClassifierError(
                f"no document of the reference has a language with a model: {', '.join(languages)}. Fix:"
                " use another reference, or leave it out"
            )
        scored = _probabilities(models, reference, names)
    by_label: dict[str, Thresholds] = {
        name: thresholds(scored[:, index], reference.languages, part.percentiles)
        for index, name in enumerate(names)
    }
    attempt.write_json(NAME, stored.to_json())
    progress.log(f"accuracy {metrics['accuracy']:.4f}, calibration error {metrics['calibration_error']:.4f}")
    attempt.commit(
        metrics={**metrics, "training_documents": len(train), "held_out_documents": len(held_out)},
        facts={"labels": names, "thresholds": by_label},
    )


def _numbers(metrics: dict[str, Any]) -> dict[str, float]:
    return {name: value for name, value in metrics.items() if name != "reliability"}


@dataclass(frozen=True)
class LabelledDocuments:
    """Documents in the order of their hashes."""

    hashes: NDArray[np.uint64]
    labels: NDArray[np.str_]
    languages: NDArray[np.str_]
    content: NDArray[Any]  # texts, or embeddings (documents, width)

    def __len__(self) -> int:
        return len(self.hashes)

    @classmethod
    def open(cls, artifact: Artifact, label: str | None) -> LabelledDocuments:
        """The rows of a `features` artifact, each text once per label. `label` replaces null labels."""
        table = pa.concat_tables(
            [pyarrow.parquet.read_table(artifact.local(name)) for name in artifact.manifest.facts["shards"]]
        )
        hashes = table["hash"].to_numpy()
        own = table["label"].fill_null(label or "").to_numpy(zero_copy_only=False).astype(np.str_)
        if "text" in table.column_names:
            content = np.array(table["text"].to_pylist(), object)
        else:
            flat = table["embedding"].combine_chunks().flatten()
            content = flat.to_numpy().reshape(len(table), -1)
        languages = table["language"].to_numpy(zero_copy_only=False).astype(np.str_)
        return cls(hashes, own, languages, content).once()

    @classmethod
    def labelled(cls, artifacts: list[Artifact], labels: list[str | None]) -> LabelledDocuments:
        """The documents of all sources."""
        parts = [cls.open(*pair) for pair in zip(artifacts, labels, strict=True)]
        columns = ("hashes", "labels", "languages", "content")
        return cls(*(np.concatenate([getattr(part, name) for part in parts]) for name in columns)).once()

    def once(self) -> LabelledDocuments:
        """The documents in the order of hashes and labels, each text once per label."""
        order = np.lexsort((self.labels, self.hashes))
        hashes, labels = self.hashes[order], self.labels[order]
        new = np.append(True, (hashes[1:] != hashes[:-1]) | (labels[1:] != labels[:-1]))
        return self[order[new]]

    def __getitem__(self, chosen: NDArray[np.int64]) -> LabelledDocuments:
        columns: tuple[Any, ...] = self.hashes, self.labels, self.languages, self.content
        return LabelledDocuments(*(column[chosen] for column in columns))

    def of(self, language: str) -> NDArray[np.int64]:
        return np.arange(len(self)) if language == ALL else np.flatnonzero(self.languages == language)

    def only(self, language: str) -> LabelledDocuments:
        return self if language == ALL else self[self.of(language)]

    def numbers(self, names: list[str]) -> NDArray[np.int64]:
        """The index of each document's label in `names`, which are sorted."""
        return np.searchsorted(np.array(names), self.labels).astype(np.int64)

    def drawn(self, seed: int, purpose: int) -> NDArray[np.uint64]:
        """A number for each text, determined by its hash, the seed and the purpose."""
        key = mix_array(np.array([(seed * 4 + purpose) % 2**64], np.uint64))
        return mix_array(self.hashes ^ key)


def _split(
    part: ClassifierPart, documents: LabelledDocuments, language: str, names: list[str]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The indices of the held-out and the training documents of a language. ClassifierError when a class has
    no held-out or no training documents."""
    own, numbers = documents.of(language), documents.numbers(names)
    there = np.bincount(numbers[own], minlength=len(names))
    if part.balance:
        order = own[np.argsort(documents.drawn(part.seed, DRAWN)[own], kind="stable")]
        own = np.sort(
            np.concatenate([order[numbers[order] == index][: there.min()] for index in range(len(names))])
        )
    held_out = documents.drawn(part.seed, HELD_OUT)[own] < np.uint64(int(part.validation * 2**64))
    for what, chosen in (("held-out", own[held_out]), ("training", own[~held_out])):
        counts = np.bincount(numbers[chosen], minlength=len(names))
        if not counts.all():
            index = int(np.lexsort((there, counts))[0])
            of = f" of language {language}" if language != ALL else ""
            raise ClassifierError(
                f"label {names[index]}{of} has {int((numbers[own] == index).sum())} documents, none of them"
                f" {what}. Fix: add documents, or change validation"
            )
    return own[held_out], own[~held_out]


Model = perceptron.PerceptronModel | FastTextModel


def _probabilities(models: dict[str, Model], documents: LabelledDocuments, names: list[str]) -> Floats:
    """The probabilities by the model of each document's language, as (documents, labels)."""
    result = np.empty((len(documents), len(names)), np.float32)
    for language, model in models.items():
        own, content = documents.of(language), documents.only(language).content
        if isinstance(model, FastTextModel):
            result[own] = model.probabilities(list(content), names)
        elif len(own):
            result[own] = perceptron.probabilities(model, content)
    return result


def _train(
    part: ClassifierPart, train: LabelledDocuments, names: list[str], path: Path, progress: Progress
) -> Model:
    if isinstance(part.training, FastText):
        fast_text.train(_examples(part, train), part.training, part.seed, path.parent, path)
        return FastTextModel(path, "the classifier")
    model = perceptron.train(
        train.content,
        train.numbers(names),
        len(names),
        part.training,
        part.seed,
        lambda epoch, loss: progress.log(f"epoch {epoch}: loss {loss:.4f}"),
    )
    perceptron.save(model, path)
    return model


def _examples(part: ClassifierPart, train: LabelledDocuments) -> Iterator[tuple[str, str]]:
    """Yields labels and texts in an order that mixes the classes, since fastText learns line by line."""
    for index in np.argsort(train.drawn(part.seed, DRAWN), kind="stable"):
        yield str(train.labels[index]), str(train.content[index])


def _stored(part: ClassifierPart, names: list[str], documents: LabelledDocuments) -> StoredClassifier:
    """The description of the classifier. ClassifierError: a document lacks the language of its model."""
    training, languages = part.training, None
    if part.by_language:
        languages = sorted(set(documents.languages.tolist()))
        if ALL in languages:
            raise ClassifierError(
                f"{len(np.flatnonzero(documents.languages == ALL))} of {len(documents)} documents state no"
                " language, and each language has a model. Fix: give every document a language, or set"
                " by_language: false"
            )
    if isinstance(training, FastText):
        longest = training.max_characters
        return StoredClassifier(method="fasttext", labels=names, max_characters=longest, languages=languages)
    return StoredClassifier(
        method="mlp",
        labels=names,
        max_characters=CHARACTERS_PER_TOKEN * training.max_tokens,
        max_tokens=training.max_tokens,
        precision=training.precision,
        languages=languages,
    )
