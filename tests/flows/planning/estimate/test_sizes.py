"""What is trained of a rank, beside the model of the engine."""

from __future__ import annotations

import pytest

from apertus_model.model.model import model_config
from flows.planning.estimate.sizes import trained_part
from flows.planning.estimate.storage import checkpoint_bytes, trained_parameters, weight_bytes
from specs.optimizer import OptimizerSpec
from tests.apertus_model.harness import MODEL, segment

PATTERNS = ["layers.1.*", "tok_embeddings.weight", "norm.weight"]


def test_the_patterns_count_the_parameters_that_have_gradients_in_the_engine() -> None:
    spec = segment("pretrain", trainable=PATTERNS, optimizer=OptimizerSpec(name="adamw", lr=1.0).resolved({}))
    model = model_config(MODEL, sequence_length=8, attention="sdpa", trainable=PATTERNS).build()
    trained = {name: one for name, one in model.named_parameters() if one.requires_grad}
    assert trained_parameters(spec) == sum(one.numel() for one in trained.values())
    # two moments of each, beside all weights
    assert checkpoint_bytes(spec) == weight_bytes(spec) + 2 * 4 * trained_parameters(spec)
    assert weight_bytes(spec) == 4 * MODEL.parameters
    part = trained_part(spec, tp=2)
    assert part is not None
    matrices = sum(one.numel() for name, one in trained.items() if one.ndim == 2 and "layers" in name)
    vectors = sum(one.numel() for one in trained.values() if one.ndim == 1) - MODEL.dim
    assert part.matrices == matrices / 2 and part.layer == matrices / 2 + vectors
    assert part.embedding == MODEL.vocab_size * MODEL.dim / 2 and part.head == MODEL.dim
    assert part.total == pytest.approx(part.layer + part.embedding + part.head)


def test_without_patterns_and_adapters_all_is_trained() -> None:
    assert trained_part(segment("pretrain")) is None
