"""Held-out losses and the next token, computed by the engine."""

from pathlib import Path

import pytest
import torch

from apertus_model.model.model import model_config
from apertus_model.trainer.loader import collate
from specs.launch import Parallel
from tests.apertus_model.harness import MODEL, Sample, SyntheticSamples, same, segment, train
from tests.machine import slow

# Held-out loss and generation


def direct_loss(weights: dict[str, torch.Tensor], samples: list[Sample]) -> float:
    model = model_config(MODEL, sequence_length=16, attention="sdpa").build()
    model.load_state_dict(weights, strict=False)
    inputs, labels = collate(samples)
    with torch.no_grad():
        logits = model(inputs["input"], inputs["positions"])
    return torch.nn.functional.cross_entropy(logits.double().flatten(0, 1), labels.flatten()).item()


@pytest.mark.parametrize(
    ("processes", "parallel"),
    [(1, Parallel()), slow(2, Parallel()), (2, Parallel(cp=2)), slow(2, Parallel(tp=2))],
)
def test_held_out_loss_per_source_equals_the_mean_over_its_labels(
    tmp_path: Path, processes: int, parallel: Parallel
) -> None:
    source = SyntheticSamples()
    heldout = {
        "even": [source[index] for index in range(1000, 1005)],
        "odd": [source[index] for index in range(2000, 2003)],
    }
    spec = segment(end_step=3, validation={"interval": 2}, parallel=parallel)
    results = train(tmp_path, spec, processes=processes, heldout=heldout)
    assert list(results[0].heldout) == [2, 3]  # at the interval, and at the end
    for name, samples in heldout.items():
        found = results[-1].heldout[3][name]
        assert found.nats == pytest.approx(direct_loss(results[0].weights, samples), abs=1e-5)
        assert found.tokens == sum(int((sample.labels != -100).sum()) for sample in samples)


def test_validation_changes_nothing_about_the_training(tmp_path: Path) -> None:
    plain = train(tmp_path / "plain", segment())[0]
    source = SyntheticSamples()
    validated = train(
        tmp_path / "validated",
        segment(validation={"interval": 1}),
        heldout={"a": [source[1], source[2], source[3]]},
    )[0]
    assert same(plain.weights, validated.weights)
