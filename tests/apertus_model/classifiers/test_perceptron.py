"""The perceptron learns as a loop in float64 does that computes gradients and AdamW by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from apertus_model.classifiers import perceptron
from apertus_model.classifiers.perceptron import PerceptronModel
from apertus_model.classifiers.transformer import ClassifierError
from apertus_model.data.order.permutation import KeyedPermutation
from specs.stages.classifier import Perceptron

SEED, ROWS, WIDTH = 5, 70, 6


def spec(**changes: Any) -> Perceptron:
    return Perceptron.model_validate(
        {"method": "mlp", "encoder": "e", "hidden": 8, "batch_size": 16, "lr": 0.01, "epochs": 3, **changes}
    )


@pytest.fixture
def rows() -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(0)
    embeddings = random.normal(size=(ROWS, WIDTH)).astype(np.float32)
    return embeddings, (embeddings[:, 0] > 0).astype(np.int64) + (embeddings[:, 1] > 1)


def by_hand(embeddings: np.ndarray, labels: np.ndarray, chosen: Perceptron, steps: int) -> list[np.ndarray]:
    """Weights after training, in float64; initial ones as torch draws them for the seed."""
    torch.manual_seed(SEED)
    model = PerceptronModel(WIDTH, chosen.hidden, 3)
    weights = [value.detach().numpy().astype(float) for value in model.parameters()]
    first, second = [np.zeros_like(w) for w in weights], [np.zeros_like(w) for w in weights]
    step = 0
    for epoch in range(chosen.epochs):
        order = [KeyedPermutation(ROWS, SEED, "classifier", epoch)(i) for i in range(ROWS)]
        for start in range(0, ROWS, chosen.batch_size):
            batch = order[start : start + chosen.batch_size]
            x, y = embeddings[batch].astype(float), labels[batch]
            w1, b1, w2, b2 = weights
            before = x @ w1.T + b1
            active = np.maximum(before, 0)
            logits = active @ w2.T + b2
            p = np.exp(logits - logits.max(1, keepdims=True))
            p /= p.sum(1, keepdims=True)
            d = (p - np.eye(3)[y]) / len(batch)
            back = (d @ w2) * (before > 0)
            share = step / 4 if step < 4 else (steps - step) / (steps - 4)
            lr = chosen.lr * share
            for i, gradient in enumerate([back.T @ x, back.sum(0), d.T @ active, d.sum(0)]):
                first[i] = 0.9 * first[i] + 0.1 * gradient
                second[i] = 0.999 * second[i] + 0.001 * gradient**2
                m, v = first[i] / (1 - 0.9 ** (step + 1)), second[i] / (1 - 0.999 ** (step + 1))
                weights[i] = weights[i] * (1 - lr * 0.01) - lr * m / (np.sqrt(v) + 1e-8)
            step += 1
    return weights


def test_training_is_adamw_on_cross_entropy(rows: tuple[np.ndarray, np.ndarray]) -> None:
    chosen = spec(dropout=0, schedule="linear", warmup_steps=4)
    losses: list[float] = []
    model = perceptron.train(*rows, 3, chosen, SEED, lambda epoch, loss: losses.append(loss))
    expected = by_hand(*rows, chosen, steps=3 * 5)
    for ours, theirs in zip(model.parameters(), expected, strict=True):
        np.testing.assert_allclose(ours.detach().numpy(), theirs, atol=2e-6)
    assert losses == sorted(losses, reverse=True)


def test_equal_seeds_give_equal_bits_and_leave_the_generator_alone(
    rows: tuple[np.ndarray, np.ndarray],
) -> None:
    torch.manual_seed(1)
    before = torch.random.get_rng_state()
    one, same, other = (perceptron.train(*rows, 3, spec(), seed) for seed in (SEED, SEED, SEED + 1))
    assert torch.equal(torch.random.get_rng_state(), before)
    assert torch.equal(one.hidden.weight, same.hidden.weight)
    assert not torch.equal(one.hidden.weight, other.hidden.weight)


def test_a_stored_perceptron_gives_the_same_probabilities(
    rows: tuple[np.ndarray, np.ndarray], tmp_path: Path
) -> None:
    model = perceptron.train(*rows, 3, spec(), SEED)
    perceptron.save(model, tmp_path / "model.safetensors")
    found = perceptron.probabilities(perceptron.load(tmp_path / "model.safetensors"), rows[0])
    assert np.array_equal(found, perceptron.probabilities(model, rows[0]))
    np.testing.assert_allclose(found.sum(1), 1, atol=1e-6)


def test_a_file_that_holds_no_perceptron_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"\x80\x04 a pickle, say")
    with pytest.raises(ClassifierError, match=r"model\.safetensors does not hold a perceptron"):
        perceptron.load(tmp_path / "model.safetensors")
    save_file({"other": torch.zeros(2)}, tmp_path / "model.safetensors")
    with pytest.raises(ClassifierError, match="does not hold a perceptron"):
        perceptron.load(tmp_path / "model.safetensors")
