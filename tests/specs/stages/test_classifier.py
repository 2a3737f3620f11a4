"""The fields of a classifier stage, and the model that a worker holds for scores."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from specs.launch import Launch, Parallel
from specs.stages.classifier import ClassifierStage, Perceptron, ScoresPart

SOURCES = {"one": {"label": "b"}, "two": {"label": "a"}}


def stage(**changes: Any) -> ClassifierStage:
    training = {"method": "fasttext"}
    return ClassifierStage.model_validate(
        {"kind": "classifier", "sources": SOURCES, "training": training, **changes}
    )


def test_defaults_of_the_perceptron_are_the_published_ones() -> None:
    """FineWeb2-HQ: src/fineweb2_hq/mlp.py, data/train_mlp.py, xlmr_embeddings.py."""
    training = stage(training={"method": "mlp", "encoder": "xlm-roberta-base"}).training
    assert isinstance(training, Perceptron)
    published = {
        **{"hidden": 256, "dropout": 0.2, "epochs": 6, "lr": 3e-4, "batch_size": 256},
        **{"max_tokens": 512, "precision": "bfloat16", "schedule": "constant"},
    }
    assert {name: getattr(training, name) for name in published} == published
    assert (stage().validation, stage().balance) == (0.1, True)


def test_metrics_are_known_where_sources_have_whole_labels() -> None:
    assert stage().labels == ["a", "b"]
    assert {"accuracy", "recall/a", "auc/b"} <= set(stage().metrics() or [])
    unknown = stage(sources={"one": {"label": "b"}, "two": {"label_column": "kind"}})
    assert unknown.labels is None and unknown.metrics() is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sources": {"one": {}}}, "set label or label_column"),
        ({"sources": {"one": {"label": "a", "label_column": "b"}}}, "set label or label_column"),
        ({"percentiles": [90, 90.0]}, "lists a percentile twice"),
        ({"percentiles": [100]}, "less than 100"),
        ({"training": {"method": "fasttext", "shortest_ngram": 3, "longest_ngram": 2}}, "3 to 2 characters"),
        ({"training": {"method": "mlp", "encoder": "installed:no_such"}}, "no installed package"),
    ],
)
def test_fields_that_contradict_each_other_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        stage(**changes)


@pytest.mark.parametrize(
    ("method", "role"), [("fasttext", None), ("mlp", "encoder"), ("sequence-classifier", "model")]
)
def test_a_worker_has_a_gpu_for_its_encoder_or_classifier(method: str, role: str | None) -> None:
    part = ScoresPart.model_construct(method=method)
    held = part.held_model
    assert (held.role if held is not None else None) == role
    assert part.gpus_of_worker(Launch(processes=4, parallel=Parallel(tp=4))) == (role is not None)
