"""Scores of documents: by a stage's classifier or a folder, the same bytes whoever computes them, and nothing
again that is stored."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet
import pytest

from apertus_model.classifiers.fast_text import FastTextModel
from apertus_model.classifiers.transformer import ClassifierError
from apertus_model.data.corpora.duplicates import text_hash
from infra.store import Artifact
from infra.store.inputs import SourceError
from tests.apertus_model.attempts import Interrupted, StopsAfterOneUnit, stored_bytes, units_of
from tests.apertus_model.encoders import language_texts, write_encoder, write_rows


def write_source(folder: Path, files: int = 4) -> list[str]:
    """Texts of three languages in files, one of them twice; in the order in which they are read."""
    texts = [text for _, text in language_texts()[::12]]
    texts[7] = texts[3]
    shares = np.array_split(np.array(texts, object), files)
    for index, share in enumerate(shares):
        write_rows(folder / f"{index}.jsonl", [{"text": text} for text in share])
    return texts


def spec(folder: Path, files_per_task: int = 1, **changes: Any) -> dict[str, Any]:
    return {
        "source": {"url": str(folder), "format": "jsonl", "max_document_bytes": 2**28},
        "files_per_task": files_per_task,
        "method": "fasttext",
        "label": "de",
        **changes,
    }


def rows_of(artifact: Artifact) -> list[tuple[int, int, float]]:
    shards = [shard["name"] for shard in artifact.manifest.facts["shards"]]
    tables = [pyarrow.parquet.read_table(artifact.local(name)) for name in shards]
    return [tuple(row.values()) for table in tables for row in table.to_pylist()]


@pytest.fixture
def classifier(bench: Any, tmp_path: Path) -> Artifact:
    """A fastText classifier of languages."""
    rows = [{"text": text, "label": label} for label, text in language_texts()[1::2]]
    write_rows(tmp_path / "labelled" / "a.jsonl", rows)
    features = bench.run(
        "features",
        "features",
        {
            "source": {"url": str(tmp_path / "labelled"), "format": "jsonl", "metadata": ["label"]},
            "files_per_task": 1,
            "encoder": None,
            "max_characters": 5000,
            "label_column": "label",
            "language_column": "label",
        },
    )
    training = {"method": "fasttext", "dim": 8, "buckets": 2000, "epochs": 20, "lr": 0.5}
    found: Artifact = bench.run(
        "classifier",
        "classifier",
        {
            "training": training,
            "labels": [None],
            "validation": 0.3,
            "balance": True,
            "percentiles": [90.0, 95.0],
            "seed": 28,
        },
        {"source:0": features},
    )
    return found


def test_every_document_has_the_score_of_its_text_in_order(
    bench: Any, classifier: Artifact, tmp_path: Path
) -> None:
    texts = write_source(tmp_path / "source")
    artifact = bench.run("scores", "s", spec(tmp_path / "source", 2), {"classifier": classifier})
    rows = rows_of(artifact)
    model = FastTextModel(classifier.local("model.bin"), "model")
    assert [row[1] for row in rows] == [text_hash(text) for text in texts]
    assert [row[2] for row in rows] == model.probabilities(texts, ["de"])[:, 0].tolist()
    assert sorted({row[0] for row in rows}) == [0, 1, 2, 3]
    facts = artifact.manifest.facts
    assert [shard["files"] for shard in facts["shards"]] == [[0, 2], [2, 4]]
    assert facts["thresholds"] == classifier.manifest.facts["thresholds"]["de"]
    histogram = np.histogram([row[2] for row in rows], 20, (0, 1))[0].tolist()
    assert artifact.manifest.metrics == {"documents": len(texts), "histogram": histogram}


def test_a_killed_part_scores_only_what_is_missing(bench: Any, classifier: Artifact, tmp_path: Path) -> None:
    write_source(tmp_path / "source")
    read = {"classifier": classifier}
    whole = bench.run("scores", "whole", spec(tmp_path / "source"), read)
    with pytest.raises(Interrupted):
        bench.run("scores", "s", spec(tmp_path / "source"), read, attempt_class=StopsAfterOneUnit)
    assert len(units_of(bench, "scores/s", "first")) == 1
    resumed = bench.run("scores", "s", spec(tmp_path / "source"), read, attempt="second")
    assert len(units_of(bench, "scores/s", "second")) == 3
    assert stored_bytes(resumed) == stored_bytes(whole)


@pytest.mark.slow
def test_a_transformers_scores_do_not_depend_on_workers_or_tasks(bench: Any, tmp_path: Path) -> None:
    folder = write_encoder(tmp_path / "classifier", labels=3)
    write_source(tmp_path / "source")
    stated = {
        "method": "sequence-classifier",
        "label": "LABEL_1",
        "max_tokens": 64,
        "url": str(folder),
    }
    one, two, larger = (
        bench.run("scores", f"s{workers}{size}", spec(tmp_path / "source", size, **stated), workers=workers)
        for workers, size in ((1, 1), (2, 1), (1, 3))
    )
    assert stored_bytes(one) == stored_bytes(two)
    assert rows_of(one) == rows_of(larger) and len({row[2] for row in rows_of(one)}) > 10
    assert one.manifest.facts["thresholds"] == {}


def test_a_model_without_the_label_is_refused_before_a_document_is_read(
    bench: Any, classifier: Artifact, tmp_path: Path
) -> None:
    write_rows(tmp_path / "source" / "a.jsonl", [])
    (tmp_path / "source" / "a.jsonl").write_text('{"no": "text"}\n')  # would be an error itself
    with pytest.raises(ClassifierError, match=r"no label 'it'\. Fix: use one of de, fr, ru"):
        bench.run("scores", "s", spec(tmp_path / "source", label="it"), {"classifier": classifier})


def test_an_empty_source_is_an_error(bench: Any, classifier: Artifact, tmp_path: Path) -> None:
    write_rows(tmp_path / "source" / "a.jsonl", [])
    with pytest.raises(SourceError, match="there is no document in"):
        bench.run("scores", "s", spec(tmp_path / "source"), {"classifier": classifier})


@pytest.mark.slow
def test_of_a_document_of_200_mib_only_the_beginning_is_tokenised(bench: Any, tmp_path: Path) -> None:
    folder = write_encoder(tmp_path / "classifier", labels=2)
    begin = "Ein langer Text. " * 200  # more than 64 tokens
    for name, text in (("long", begin + "x" * (200 * 2**20)), ("short", begin)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.jsonl").write_text(json.dumps({"text": text}))
    stated = {"method": "sequence-classifier", "label": "LABEL_1", "max_tokens": 64, "url": str(folder)}
    short = bench.run("scores", "short", spec(tmp_path / "short", **stated))
    tracemalloc.start()
    long = bench.run("scores", "long", spec(tmp_path / "long", **stated))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert rows_of(long)[0][2] == rows_of(short)[0][2]
    assert peak < 6 * 200 * 2**20  # the line, its JSON and its bytes for the hash; its tokens would be more
