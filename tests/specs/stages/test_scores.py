"""Scores of one source: the model that a worker holds for each method."""

from __future__ import annotations

import pytest

from specs.launch import Launch, Parallel
from specs.stages.scores import ScoresPart


@pytest.mark.parametrize(
    ("method", "role"), [("fasttext", None), ("mlp", "encoder"), ("sequence-classifier", "model")]
)
def test_a_worker_has_a_gpu_for_its_encoder_or_classifier(method: str, role: str | None) -> None:
    part = ScoresPart.model_construct(method=method)
    held = part.held_model
    assert (held.role if held is not None else None) == role
    assert part.gpus_of_worker(Launch(processes=4, parallel=Parallel(tp=4))) == (role is not None)
