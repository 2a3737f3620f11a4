"""Classifiers of languages, trained on labelled sources: they learn, and follow from texts and seed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet
import pytest

from apertus_model.classifiers.fast_text import FastTextModel
from apertus_model.classifiers.transformer import ClassifierError
from infra.store import Artifact
from infra.store.inputs import SourceError
from tests.apertus_model.attempts import stored_bytes
from tests.apertus_model.data.corpora.test_scored import corpus
from tests.apertus_model.encoders import language_texts, write_encoder, write_rows
from tests.apertus_model.stages.test_scores import rows_of

Row = dict[str, object]

FASTTEXT = {"method": "fasttext", "dim": 8, "buckets": 2000, "epochs": 20, "lr": 0.5}
MLP = {"method": "mlp", "encoder": "encoder", "hidden": 32, "lr": 0.02, "epochs": 20, "batch_size": 32}


class Trained:
    """Features and classifiers of rows, or of (label, text)."""

    def __init__(self, bench: Any, folder: Path) -> None:
        self.bench, self.folder, self._count = bench, folder, 0

    def features(self, rows: Sequence[tuple[str, str] | Row], **changes: Any) -> Artifact:
        self._count += 1
        name = f"source-{self._count}"
        dicts = [row if isinstance(row, dict) else {"text": row[1], "label": row[0]} for row in rows]
        write_rows(self.folder / name / "a.jsonl", dicts)
        spec = {
            "source": {
                "url": str(self.folder / name),
                "format": "jsonl",
                "metadata": [column for column in ("label", "language") if column in dicts[0]],
            },
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


def test_fasttext_separates_languages_and_its_thresholds_are_numpys(trained: Trained) -> None:
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


def test_a_perceptron_separates_languages_by_embeddings(trained: Trained, tmp_path: Path) -> None:
    encoder = {"encoder": str(write_encoder(tmp_path / "encoder")), "max_tokens": 128, "precision": "float32"}
    rows = [row for row in language_texts() if row[0] != "fr"][::3]
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
    from apertus_model.stages.classifier import LabelledDocuments, _split
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
    documents = LabelledDocuments.labelled([features], [None])
    held_out, train = _split(part, documents, "", ["a", "b"])
    assert sorted([*held_out, *train]) == list(range(len(rows)))
    assert not set(documents.hashes[held_out].tolist()) & set(documents.hashes[train].tolist())


def _long_and_short(languages: tuple[str, ...]) -> list[Row]:
    """Texts of some languages, half of each language labelled as long."""
    texts = [(language, text) for language, text in language_texts()[::8] if language in languages]
    lengths = {one: np.median([len(text) for other, text in texts if other == one]) for one in languages}
    return [
        {"text": text, "language": language, "label": "long" if len(text) > lengths[language] else "short"}
        for language, text in texts
    ]


@pytest.mark.parametrize("method", ["fasttext", "mlp"])
def test_a_model_for_each_language_is_that_of_its_documents_alone(
    bench: Any, trained: Trained, tmp_path: Path, tokenizer: Artifact, method: str
) -> None:
    """Trained, measured, and scored as a classifier that has seen no other language."""
    url, settings = None, {"training": FASTTEXT}
    encoder = None
    if method == "mlp":
        url = str(write_encoder(tmp_path / "encoder"))
        read = {"encoder": url, "max_tokens": 64, "precision": "float32"}
        encoder, settings = read, {"training": MLP | read}
    rows = _long_and_short(("de", "ru", "fr"))
    asked = {"encoder": encoder, "language_column": "language"}
    reference = trained.features(rows, **asked)
    both = trained.classifier(
        [trained.features([row for row in rows if row["language"] != "fr"], **asked)],
        by_language=True,
        reference=reference,
        **settings,
    )
    assert both.json("classifier.json")["languages"] == ["de", "ru"]
    write_rows(tmp_path / "web" / "a.jsonl", rows)
    spec = {"files_per_task": 1, "method": method, "label": "long", "url": url}
    source = {"url": str(tmp_path / "web"), "format": "jsonl"}
    named = spec | {"source": source | {"metadata": ["language"]}, "language_column": "language"}
    scores = bench.run("scores", "both", named, {"classifier": both})
    found = [row[2] for row in rows_of(scores)]
    for number, language in enumerate(["de", "ru"]):
        own = [row for row in rows if row["language"] == language]
        alone = trained.classifier([trained.features(own, **asked)], reference=reference, **settings)
        suffix = "bin" if method == "fasttext" else "safetensors"
        assert both.bytes(f"model-{number:05d}.{suffix}") == alone.bytes(f"model.{suffix}")
        metrics = {name: value for name, value in alone.manifest.metrics.items() if name != "reliability"}
        own_metrics = both.manifest.metrics["languages"][language]
        assert own_metrics == {name: metrics[name] for name in own_metrics} and "auc/long" in own_metrics
        thresholds = (one.manifest.facts["thresholds"]["long"] for one in (both, alone))
        assert len({tuple(one[language].items()) for one in thresholds}) == 1
        single = bench.run("scores", language, spec | {"source": source}, {"classifier": alone})
        expected = [row[2] for row in rows_of(single)]
        places = [place for place, row in enumerate(rows) if row["language"] == language]
        assert [found[place] for place in places] == [expected[place] for place in places]
    assert "fr" not in both.manifest.facts["thresholds"]["long"]
    french = [score for score, row in zip(found, rows, strict=True) if row["language"] == "fr"]
    assert set(french) == {None} and scores.manifest.metrics["without_score"] == len(french)
    assert scores.manifest.metrics["documents"] == len(rows)
    below = sum(score is not None and score < 0.5 for score in found)
    for missing, more in (("keep", 0), ("drop", len(french))):
        chosen = {"filter": "score", "model": {"from": "l", "label": "long"}, "min": 0.5, "missing": missing}
        made = corpus(bench, missing, tmp_path / "web", scores, tokenizer, chosen)
        assert below > 0 and made.manifest.metrics["dropped"] == {"score": below + more}
    with pytest.raises(SourceError, match="has nothing in column 'score', which a filter needs"):
        corpus(bench, "error", tmp_path / "web", scores, tokenizer, chosen | {"missing": "error"})


def test_a_language_that_lacks_a_label_or_a_document_without_language_is_an_error(trained: Trained) -> None:
    rows = _long_and_short(("de", "ru"))
    lacking = [row for row in rows if (row["language"], row["label"]) != ("ru", "long")]
    features = trained.features(lacking, language_column="language")
    with pytest.raises(
        ClassifierError, match="label long of language ru has 0 documents, none of them held-out"
    ):
        trained.classifier([features], by_language=True)
    features = trained.features([*rows, {"text": "who knows", "label": "short", "language": None}],
                                language_column="language")  # fmt: skip
    with pytest.raises(ClassifierError, match=rf"1 of {len(rows) + 1} documents state no language"):
        trained.classifier([features], by_language=True)
