"""Scores reach the filters of a corpus as a column, and stored thresholds as numbers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from apertus_model.data.corpora.duplicates import text_hash
from apertus_model.data.corpora.examples import from_jsonl
from infra.store import Artifact
from infra.store.inputs import SourceError
from tests.apertus_model.encoders import language_texts, write_rows
from tests.apertus_model.stages.test_scores import classifier, rows_of, spec, write_source

__all__ = ["classifier"]


def corpus(
    bench: Any, name: str, folder: Path, scores: Artifact, tokenizer: Artifact, *filters: Any, **task: int
) -> Artifact:
    artifact: Artifact = bench.run(
        "corpus",
        name,
        {
            "source": {"url": str(folder), "format": "jsonl"},
            "process": {"holdout": 0.2, "filters": list(filters)},
            "seed": 28,
            "files_per_task": task.get("files_per_task", 1),
        },
        {"tokenizer": tokenizer, "scores:0": scores},
    )
    return artifact


@pytest.fixture
def scores(bench: Any, classifier: Artifact, tmp_path: Path) -> Artifact:
    write_source(tmp_path / "source")
    found: Artifact = bench.run("scores", "s", spec(tmp_path / "source", 2), {"classifier": classifier})
    return found


MODEL = {"filter": "score", "model": {"from": "languages", "label": "de"}}


@pytest.mark.parametrize("files_per_task", [1, 3, 4])
def test_documents_are_kept_by_the_score_of_their_text(
    bench: Any, scores: Artifact, tokenizer: Artifact, tmp_path: Path, files_per_task: int
) -> None:
    """The tasks of the scores have two files; those of the corpus another number."""
    artifact = corpus(
        bench,
        f"c{files_per_task}",
        tmp_path / "source",
        scores,
        tokenizer,
        {**MODEL, "min": 0.5},
        files_per_task=files_per_task,
    )
    above = sum(score >= 0.5 for _, _, score in rows_of(scores))
    metrics = artifact.manifest.metrics
    assert 0 < above < metrics["read"]["documents"] == len(rows_of(scores))
    assert metrics["dropped"] == {"score": metrics["read"]["documents"] - above}
    shown = [row["text"] for row in from_jsonl(artifact.bytes("examples.jsonl")) if row["reason"] == "kept"]
    assert {text_hash(text) for text in shown} <= {row[1] for row in rows_of(scores) if row[2] >= 0.5}


def test_a_percentile_is_the_stored_threshold(
    bench: Any, scores: Artifact, tokenizer: Artifact, tmp_path: Path
) -> None:
    threshold = scores.manifest.facts["thresholds"][""]["p90"]
    artifact = corpus(bench, "c", tmp_path / "source", scores, tokenizer, {**MODEL, "max": "p90"})
    above = sum(score > threshold for _, _, score in rows_of(scores))
    assert 0 < above == artifact.manifest.metrics["dropped"]["score"]


def test_a_percentile_by_language_leaves_other_languages_alone(
    bench: Any, scores: Artifact, tokenizer: Artifact, tmp_path: Path
) -> None:
    """A second filter states the language: here, that of every document is German or unknown."""
    texts = [text for _, text in language_texts()[::12]]
    for path in (tmp_path / "source").iterdir():
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        for row in rows:
            row["language"] = ["de", "xx"][texts.index(row["text"]) % 2]
        write_rows(path, rows)
    threshold = scores.manifest.facts["thresholds"]["de"]["p90"]
    artifact = bench.run(
        "corpus",
        "c",
        {
            "source": {"url": str(tmp_path / "source"), "format": "jsonl"},
            "process": {"holdout": 0.2, "filters": [{**MODEL, "max": "p90", "by": "language"}]},
            "seed": 28,
            "files_per_task": 1,
        },
        {"tokenizer": tokenizer, "scores:0": scores},
    )
    languages = [
        json.loads(line)["language"]
        for path in sorted((tmp_path / "source").iterdir())
        for line in path.read_text().splitlines()
    ]
    above = [
        language == "de" and score > threshold
        for language, (_, _, score) in zip(languages, rows_of(scores), strict=True)
    ]
    assert 0 < sum(above) == artifact.manifest.metrics["dropped"]["score"]


def test_a_score_is_a_column_for_later_filters(
    bench: Any, scores: Artifact, tokenizer: Artifact, tmp_path: Path
) -> None:
    column = {**MODEL, "column": "german"}
    later = {"filter": "score", "column": "german", "max": 0.5}
    artifact = corpus(bench, "c", tmp_path / "source", scores, tokenizer, column, later)
    above = sum(np.float32(score) > 0.5 for _, _, score in rows_of(scores))
    assert artifact.manifest.metrics["dropped"] == {"score": 0, "score-2": above}


def test_files_that_changed_since_they_were_scored_are_an_error(
    bench: Any, scores: Artifact, tokenizer: Artifact, tmp_path: Path
) -> None:
    write_rows(tmp_path / "source" / "2.jsonl", [{"text": "another text"}])
    with pytest.raises(SourceError, match=r"document .* has no score in scores/s: the files have changed"):
        corpus(bench, "c", tmp_path / "source", scores, tokenizer, {**MODEL, "min": 0.5})
