"""Evaluations score each source and each bucket."""

import math

import pytest

from apertus_model.stages import evaluate
from infra.store import Artifact
from specs.stages.evaluate import EvaluatePart
from tests.apertus_model.stages.training import SPEC, Stages

EVALUATION = EvaluatePart(
    model=SPEC.model,
    sequence_length=16,
    samples=3,
    prefix=16,
    suffix=8,
    source_names=["steady", "striding"],
    batch_size=2,
)


@pytest.mark.parametrize("processes", [1, 2])
def test_evaluation_scores_each_source_and_each_bucket(
    stages: Stages, trained: Artifact, processes: int
) -> None:
    inputs = {
        "checkpoint": stages.ref("pretrain/trained", 6),
        "source:0": stages.ref("corpus/steady"),
        "source:1": stages.ref("corpus/striding"),
        "probes": stages.ref("corpus/steady"),
    }
    name = f"evaluation-{processes}"
    spec = EVALUATION.model_dump(mode="json")
    stages.run(evaluate, stages.job("evaluate", name, spec, inputs=inputs), processes=processes)
    metrics = Artifact(stages.store, f"evaluate/{name}").manifest.metrics
    assert {key for key in metrics if key.startswith("perplexity")} == {
        "perplexity", "perplexity/steady", "perplexity/striding"
    }  # fmt: skip
    assert {key for key in metrics if key.startswith("memorisation/exact") and key[-1].isdigit()} == {
        "memorisation/exact/0", "memorisation/exact/8"
    }  # fmt: skip
    for measure in ("exact", "rouge_l", "common_substring"):
        found = metrics[f"memorisation/{measure}/8"]
        assert metrics[f"memorisation/{measure}/8/low"] <= found <= metrics[f"memorisation/{measure}/8/high"]
    low, high = sorted((metrics["perplexity/steady"], metrics["perplexity/striding"]))
    assert low <= metrics["perplexity"] <= high
    assert all(math.isfinite(value) for value in metrics.values())
    if processes == 2:
        alone = Artifact(stages.store, "evaluate/evaluation-1").manifest.metrics
        assert metrics == pytest.approx(alone, rel=1e-5)
