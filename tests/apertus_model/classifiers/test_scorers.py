"""Scores of a Hugging Face folder are those of transformers' pipeline; a label that is not there is named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from apertus_model.classifiers.fast_text import train
from apertus_model.classifiers.scorers import open_scorer
from apertus_model.classifiers.transformer import ClassifierError
from specs.stages.classifier import FastText, ScoresPart
from tests.apertus_model.encoders import language_texts, write_encoder

TEXTS = [text for _, text in language_texts()[::9]]


def part(url: Path, label: str = "LABEL_2", **changes: Any) -> ScoresPart:
    source = {"url": "documents", "format": "text"}
    method = {"method": "sequence-classifier", "max_tokens": 100, **changes}
    return ScoresPart.model_validate(
        {"source": source, "files_per_task": 1, "label": label, "url": str(url), **method}
    )


@pytest.mark.parametrize("problem", [None, "multi_label_classification", "regression"])
def test_scores_are_those_of_the_pipeline_of_transformers(tmp_path: Path, problem: str | None) -> None:
    from transformers import pipeline

    folder = write_encoder(tmp_path / "classifier", labels=1 if problem == "regression" else 3)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"problem_type": problem}))
    label = "LABEL_0" if problem == "regression" else "LABEL_2"
    scorer = open_scorer(part(folder, label), None, tmp_path / "scratch")
    theirs = pipeline("text-classification", model=str(folder), top_k=None, device="cpu")
    expected = [
        next(row["score"] for row in rows if row["label"] == label)
        for rows in theirs(TEXTS, truncation=True, max_length=100)
    ]
    found = scorer.scores(TEXTS, [""] * len(TEXTS))
    assert found.dtype == np.float32 and scorer.characters == 3200
    np.testing.assert_allclose(found, expected, atol=1e-5)
    assert len(set(found.tolist())) == len(TEXTS)


def test_a_label_that_the_model_lacks_is_named_with_those_that_it_has(tmp_path: Path) -> None:
    folder = write_encoder(tmp_path / "classifier", labels=2)
    with pytest.raises(ClassifierError, match=r"no label 'toxic'\. Fix: use one of LABEL_0, LABEL_1"):
        open_scorer(part(folder, "toxic"), None, tmp_path / "scratch")


def test_a_fasttext_model_with_other_labels_is_named_with_those_that_it_has(tmp_path: Path) -> None:
    train(
        language_texts()[::20], FastText(method="fasttext", dim=2, buckets=9), 7, tmp_path, tmp_path / "a.bin"
    )
    with pytest.raises(ClassifierError, match=r"a\.bin has no label 'toxic'\. Fix: use one of (de|fr|ru), "):
        open_scorer(part(tmp_path / "a.bin", "toxic", method="fasttext"), None, tmp_path)
