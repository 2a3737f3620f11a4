"""Classifiers of languages, trained on labelled sources: they learn, and follow from texts and seed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet
import pytest

from apertus_model.classifiers.fast_text import FastTextModel
from apertus_model.classifiers.transformer import ClassifierError
from infra.store import Artifact
from tests.apertus_model.attempts import stored_bytes
from tests.apertus_model.encoders import language_texts, write_encoder, write_rows

FASTTEXT = {"method": "fasttext", "dim": 8, "buckets": 2000, "epochs": 20, "lr": 0.5}
MLP = {"method": "mlp", "encoder": "encoder", "hidden": 32, "lr": 0.02, "epochs": 20, "batch_size": 32}


class Trained:
    """Features and classifiers of rows of (label, text)."""

    def __init__(self, bench: Any, folder: Path) -> None:
        self.bench, self.folder, self._count = bench, folder, 0

    def features(self, rows: list[tuple[str, str]], **changes: Any) -> Artifact:
        self._count += 1
        name = f"source-{self._count}"
        write_rows(self.folder / name / "a.jsonl", [{"text": text, "label": label} for label, text in rows])
        spec = {
            "source": {"url": str(self.folder / name), "format": "jsonl", "metadata": ["label"]},
            "files_per_task": 1,
            "encoder": None,
            "max_characters": 5000,
            "label_column": "label",
            "language_column": "label",
            **changes,
        }
        artifact: Artifact = self.bench.run("features", name, spec)
        return artifact

    def classifier(
        self, sources: list[Artifact], labels: list[str | None] | None = None, **changes: Any
    ) -> Artifact:
        self._count += 1
        reference = changes.pop("reference", None)
        spec = {
            "training": FASTTEXT,
            "labels": labels or [None] * len(sources),
            "validation": 0.3,
            "balance": True,
            "percentiles": [90.0, 95.0],
            "seed": 28,
            **changes,
        }
        inputs = {f"source:{index}": source for index, source in enumerate(sources)}
        artifact: Artifact = self.bench.run(
            "classifier",
            f"classifier-{self._count}",
            spec,
            inputs | ({"reference": reference} if reference else {}),
        )
        return artifact


@pytest.fixture
def trained(bench: Any, tmp_path: Path) -> Trained:
    return Trained(bench, tmp_path)


def test_fasttext_tells_languages_and_its_thresholds_are_numpys(trained: Trained) -> None:
    features = trained.features(list(language_texts()))
    artifact = trained.classifier([features], reference=features)
    metrics, facts = artifact.manifest.metrics, artifact.manifest.facts
    assert metrics["accuracy"] > 0.9 and metrics["auc/ru"] > 0.99
    assert metrics["training_documents"] + metrics["held_out_documents"] == len(language_texts())
    assert metrics["held_out_documents"] == pytest.approx(0.3 * len(language_texts()), rel=0.2)
    assert sum(row["documents"] for row in metrics["reliability"]) == metrics["held_out_documents"]
    assert artifact.json("classifier.json")["labels"] == facts["labels"] == ["de", "fr", "ru"]
    model = FastTextModel(artifact.local("model.bin"), "model")
    for language in ("", "fr"):
        texts = [text for label, text in language_texts() if language in ("", label)]
        scores = model.probabilities(texts, ["de"])[:, 0].astype(float)
        found = facts["thresholds"]["de"][language]
        assert found == pytest.approx({"p90": np.percentile(scores, 90), "p95": np.percentile(scores, 95)})


def test_a_perceptron_tells_languages_by_embeddings(trained: Trained, tmp_path: Path) -> None:
    encoder = {"encoder": str(write_encoder(tmp_path / "encoder")), "max_tokens": 128, "precision": "float32"}
    rows = [row for row in language_texts() if row[0] != "fr"]
    artifact = trained.classifier([trained.features(rows, encoder=encoder)], training=MLP)
    assert artifact.manifest.metrics["accuracy"] > 0.9
    assert sorted(artifact.manifest.files) == ["classifier.json", "model.safetensors"]
    assert artifact.json("classifier.json") == {
        "method": "mlp",
        "labels": ["de", "ru"],
        "max_characters": 32 * 512,
        "max_tokens": 512,
        "precision": "bfloat16",
    }


def test_bytes_do_not_depend_on_order_or_repetition_of_documents(trained: Trained) -> None:
    rows = list(language_texts()[::3])
    whole = trained.classifier([trained.features(rows)])
    halves = [trained.features(rows[::-1][::2] + rows[:20]), trained.features(rows[::-1][1::2])]
    assert stored_bytes(trained.classifier(halves)) == stored_bytes(whole)
    assert stored_bytes(trained.classifier(halves, seed=29)) != stored_bytes(whole)


def test_labels_of_whole_sources_and_of_a_column_are_the_same(trained: Trained) -> None:
    rows = [row for row in language_texts() if row[0] != "fr"][::4]
    column = trained.classifier([trained.features(rows)])
    sources = [
        trained.features([row for row in rows if row[0] == label], label_column=None)
        for label in ("ru", "de")
    ]
    assert stored_bytes(trained.classifier(sources, ["ru", "de"])) == stored_bytes(column)


def test_larger_classes_lose_documents_unless_balance_is_off(trained: Trained) -> None:
    german = [row for row in language_texts() if row[0] == "de"]
    russian = [row for row in language_texts() if row[0] == "ru"][:50]
    features = trained.features(german + russian)

    def documents(**changes: Any) -> int:
        metrics = trained.classifier([features], **changes).manifest.metrics
        return int(metrics["training_documents"] + metrics["held_out_documents"])

    assert documents() == 100
    assert documents(balance=False) == len(german) + 50


def test_one_class_only_is_an_error(trained: Trained) -> None:
    features = trained.features([("de", "eins"), ("de", "zwei")])
    with pytest.raises(ClassifierError, match="all documents have the label de; a classifier needs a second"):
        trained.classifier([features])


def test_a_class_without_held_out_documents_is_an_error(trained: Trained) -> None:
    features = trained.features([("de", "eins"), ("fr", "deux"), ("fr", "trois")])
    with pytest.raises(ClassifierError, match=r"label \w+ has 1 documents, none of them (held-out|training)"):
        trained.classifier([features])


def test_equal_texts_are_on_one_side(trained: Trained) -> None:
    """Each text has both labels."""
    from apertus_model.stages.classifier import Documents, _split
    from specs.stages.classifier import ClassifierPart

    rows = [(label, text) for label in ("a", "b") for _, text in language_texts()[::5]]
    features = trained.features(rows)
    assert len(pyarrow.parquet.read_table(features.local("features-00000.parquet"))) == len(rows)
    part = ClassifierPart.model_validate(
        {
            "training": FASTTEXT,
            "labels": [None],
            "validation": 0.3,
            "balance": False,
            "percentiles": [],
            "seed": 1,
        }
    )
    held_out, train = _split(part, Documents.labelled([features], [None]), ["a", "b"])
    assert len(held_out) + len(train) == len(rows)
    assert not set(held_out.hashes.tolist()) & set(train.hashes.tolist())
