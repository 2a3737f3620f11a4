"""The `classifier` stage: a classifier of documents, from the features of labelled sources.

Artifact: `classifier.json` (`StoredClassifier`), and `model.safetensors` (mlp) or `model.bin` (fastText's own
format). The facts hold the thresholds: by label, by language ("" for all), by percentile.

Invariants:
- Training and held-out documents, and their order, follow from hashes of the texts and the seed: not from the
  order of sources, files or units. Equal texts are on one side. A text that a label has twice counts once.
- A classifier with fewer than two classes, or a class without training or held-out documents, is an error.

Memory: all texts or embeddings at once; a million embeddings of 768 numbers are 3 GB.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet
from numpy.typing import NDArray

from apertus_model.classifiers import fast_text, perceptron
from apertus_model.classifiers.fast_text import FastTextModel
from apertus_model.classifiers.measures import Thresholds, measure, thresholds
from apertus_model.classifiers.stored import MODEL, NAME, StoredClassifier
from apertus_model.classifiers.transformer import ClassifierError, Floats
from apertus_model.data.permutation import mix_array
from apertus_model.progress import Progress
from apertus_model.stop import StopSignal
from apertus_model.trainer.process import prepare_process
from infra.store import Artifact, Attempt
from specs.job import Job
from specs.scoring import CHARACTERS_PER_TOKEN
from specs.stages.classifier import ClassifierPart, FastText

DRAWN, HELD_OUT = 1, 2  # what a hash of text and seed is for
Content = Floats | list[str]


def run(job: Job, attempt: Attempt, progress: Progress, stop: StopSignal) -> None:
    """Runs the stage. ClassifierError when the documents cannot be learned from."""
    part = ClassifierPart.model_validate(job.spec)
    prepare_process(job.launch.threads or 2)
    documents = Documents.labelled(
        [attempt.input_artifact(f"source:{index}") for index in range(len(part.labels))], part.labels
    )
    names = sorted(set(documents.labels.tolist()))
    if len(names) < 2:
        raise ClassifierError(
            f"all documents have the label {names[0]}; a classifier needs a second one. Fix: another source,"
            " or the right label_column"
        )
    held_out, train = _split(part, documents, names)
    progress.log(f"{len(train)} training documents, {len(held_out)} held out, labels {', '.join(names)}")
    model = _train(part, train, names, attempt, progress)
    probabilities = model.probabilities(held_out.content)
    metrics = measure(probabilities, held_out.numbers(names), names)
    reference = (
        Documents.open(attempt.input_artifact("reference"), None) if "reference" in job.inputs else held_out
    )
    scored = probabilities if reference is held_out else model.probabilities(reference.content)
    found: dict[str, Thresholds] = {
        name: thresholds(scored[:, index], reference.languages, part.percentiles)
        for index, name in enumerate(names)
    }
    attempt.write_json(NAME, _stored(part, names).model_dump(mode="json"))
    attempt.put(model.path, MODEL[part.training.method])
    progress.log(f"accuracy {metrics['accuracy']:.4f}, calibration error {metrics['calibration_error']:.4f}")
    attempt.commit(
        metrics={**metrics, "training_documents": len(train), "held_out_documents": len(held_out)},
        facts={"labels": names, "thresholds": found},
    )


@dataclass(frozen=True)
class Documents:
    """Documents in the order of their hashes."""

    hashes: NDArray[np.uint64]
    labels: NDArray[np.str_]
    languages: NDArray[np.str_]
    content: Content  # texts, or embeddings (documents, width)

    def __len__(self) -> int:
        return len(self.hashes)

    @classmethod
    def open(cls, artifact: Artifact, label: str | None) -> Documents:
        """The rows of a `features` artifact, each text once for each label. `label`: of all of them."""
        table = pa.concat_tables(
            [pyarrow.parquet.read_table(artifact.local(name)) for name in artifact.manifest.facts["shards"]]
        )
        hashes = table["hash"].to_numpy()
        own = table["label"].fill_null(label or "").to_numpy(zero_copy_only=False).astype(np.str_)
        content: Content
        if "text" in table.column_names:
            content = table["text"].to_pylist()
        else:
            flat = table["embedding"].combine_chunks().flatten()
            content = flat.to_numpy().reshape(len(table), -1)
        languages = table["language"].to_numpy(zero_copy_only=False).astype(np.str_)
        return cls(hashes, own, languages, content).once()

    @classmethod
    def labelled(cls, artifacts: list[Artifact], labels: list[str | None]) -> Documents:
        """The documents of all sources."""
        parts = [cls.open(*pair) for pair in zip(artifacts, labels, strict=True)]
        content: Content = (
            [text for part in parts for text in part.content]
            if isinstance(parts[0].content, list)
            else np.concatenate([part.content for part in parts])
        )
        return cls(
            np.concatenate([part.hashes for part in parts]),
            np.concatenate([part.labels for part in parts]),
            np.concatenate([part.languages for part in parts]),
            content,
        ).once()

    def once(self) -> Documents:
        """In order, each text once for each label."""
        order = np.lexsort((self.labels, self.hashes))
        hashes, labels = self.hashes[order], self.labels[order]
        new = np.append(True, (hashes[1:] != hashes[:-1]) | (labels[1:] != labels[:-1]))
        return self[order[new]]

    def __getitem__(self, chosen: NDArray[np.int64]) -> Documents:
        content = (
            [self.content[index] for index in chosen]
            if isinstance(self.content, list)
            else self.content[chosen]
        )
        return Documents(self.hashes[chosen], self.labels[chosen], self.languages[chosen], content)

    def numbers(self, names: list[str]) -> NDArray[np.int64]:
        """The places of the labels among sorted names."""
        return np.searchsorted(np.array(names), self.labels).astype(np.int64)

    def drawn(self, seed: int, purpose: int) -> NDArray[np.uint64]:
        """A number for each text that follows from its hash, the seed and the purpose."""
        key = mix_array(np.array([(seed * 4 + purpose) % 2**64], np.uint64))
        return mix_array(self.hashes ^ key)


def _split(part: ClassifierPart, documents: Documents, names: list[str]) -> tuple[Documents, Documents]:
    """Held-out and training documents. ClassifierError for a class that has none of one kind."""
    numbers = documents.numbers(names)
    if part.balance:
        order = np.argsort(documents.drawn(part.seed, DRAWN), kind="stable")
        fewest = int(np.bincount(numbers).min())
        kept = [order[numbers[order] == index][:fewest] for index in range(len(names))]
        documents = documents[np.sort(np.concatenate(kept))]
        numbers = documents.numbers(names)
    held_out = documents.drawn(part.seed, HELD_OUT) < np.uint64(int(part.validation * 2**64))
    for what, chosen in (("held-out", held_out), ("training", ~held_out)):
        counts = np.bincount(numbers[chosen], minlength=len(names))
        if not counts.all():
            index = int(counts.argmin())
            raise ClassifierError(
                f"label {names[index]} has {int((numbers == index).sum())} documents, none of them {what}."
                " Fix: more documents, or another validation"
            )
    return documents[np.flatnonzero(held_out)], documents[np.flatnonzero(~held_out)]


@dataclass(frozen=True)
class Trained:
    """A model and its file."""

    path: Path
    model: perceptron.PerceptronModel | FastTextModel
    names: list[str]

    def probabilities(self, content: Content) -> Floats:
        """(documents, labels)."""
        if isinstance(self.model, FastTextModel):
            return self.model.probabilities(list(content), self.names)
        return perceptron.probabilities(self.model, np.asarray(content))


def _train(
    part: ClassifierPart, train: Documents, names: list[str], attempt: Attempt, progress: Progress
) -> Trained:
    path = attempt.workdir / MODEL[part.training.method]
    if isinstance(part.training, FastText):
        fast_text.train(_examples(part, train), part.training, part.seed, attempt.workdir, path)
        return Trained(path, FastTextModel(path, "the classifier"), names)
    model = perceptron.train(
        np.asarray(train.content),
        train.numbers(names),
        len(names),
        part.training,
        part.seed,
        lambda epoch, loss: progress.log(f"epoch {epoch}: loss {loss:.4f}"),
    )
    perceptron.save(model, path)
    return Trained(path, model, names)


def _examples(part: ClassifierPart, train: Documents) -> Iterator[tuple[str, str]]:
    """Labels and texts in an order that mixes the classes, since fastText learns from line after line."""
    for index in np.argsort(train.drawn(part.seed, DRAWN), kind="stable"):
        yield str(train.labels[index]), str(train.content[index])


def _stored(part: ClassifierPart, names: list[str]) -> StoredClassifier:
    training = part.training
    if isinstance(training, FastText):
        return StoredClassifier(method="fasttext", labels=names, max_characters=training.max_characters)
    return StoredClassifier(
        method="mlp",
        labels=names,
        max_characters=CHARACTERS_PER_TOKEN * training.max_tokens,
        max_tokens=training.max_tokens,
        precision=training.precision,
    )
