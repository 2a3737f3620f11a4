"""The two-layer perceptron on embeddings: training, probabilities, and its file.

Invariants: training runs in float32 on the CPU, in this process; batches, initial weights and dropout follow
from the seed alone. The file is safetensors: `hidden.weight`, `hidden.bias`, `output.weight`, `output.bias`.
"""

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn

from apertus_model.classifiers.transformer import ClassifierError, Floats
from apertus_model.data.order.permutation import KeyedPermutation
from specs.stages.classifier import Perceptron

ROWS = 65_536  # rows whose probabilities are computed together


class PerceptronModel(nn.Module):
    """A model from embeddings (rows, width) to logits (rows, labels)."""

    def __init__(self, width: int, hidden: int, labels: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.hidden = nn.Linear(width, hidden)
        self.output = nn.Linear(hidden, labels)
        self._dropout = dropout

    def forward(self, embeddings: torch.Tensor) -> torch.Tensor:
        active = nn.functional.relu(self.hidden(embeddings))
        return self.output(nn.functional.dropout(active, self._dropout, self.training))


def train(
    embeddings: Floats,
    labels: NDArray[np.int64],
    classes: int,
    spec: Perceptron,
    seed: int,
    on_epoch: Callable[[int, float], None] = lambda epoch, loss: None,
) -> PerceptronModel:
    """Trains on all rows. `on_epoch` gets the number of finished epochs and the mean loss of the last one."""
    rows, targets = torch.from_numpy(embeddings), torch.from_numpy(labels)
    steps = spec.epochs * math.ceil(len(rows) / spec.batch_size)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = PerceptronModel(rows.shape[1], spec.hidden, classes, spec.dropout).train()
        optimizer = torch.optim.AdamW(model.parameters(), lr=spec.lr, weight_decay=spec.weight_decay)
        step = 0
        for epoch in range(spec.epochs):
            order = KeyedPermutation(len(rows), seed, "classifier", epoch).array(np.arange(len(rows)))
            total = 0.0
            for batch in torch.from_numpy(order).split(spec.batch_size):
                optimizer.param_groups[0]["lr"] = spec.lr * rate(spec, step, steps)
                loss = nn.functional.cross_entropy(model(rows[batch]), targets[batch])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                total += float(loss.detach()) * len(batch)
                step += 1
            on_epoch(epoch + 1, total / len(rows))
    return model.eval()


def rate(spec: Perceptron, step: int, steps: int) -> float:
    """The factor on the learning rate in a step, as in transformers' schedules."""
    if step < spec.warmup_steps:
        return step / spec.warmup_steps
    if spec.schedule == "constant":
        return 1.0
    return (steps - step) / max(1, steps - spec.warmup_steps)


@torch.inference_mode()
def probabilities(model: PerceptronModel, embeddings: Floats) -> Floats:
    """The probabilities of the labels, as (rows, labels)."""
    batches = [model(rows).softmax(-1) for rows in torch.from_numpy(embeddings).split(ROWS)]
    return torch.cat(batches).numpy()


def save(model: PerceptronModel, path: Path) -> None:
    save_file(model.state_dict(), path)


def load(path: Path) -> PerceptronModel:
    """Loads a model that `save` has written. ClassifierError for any other file."""
    try:
        weights = load_file(path)
        (hidden, width), (labels, _) = weights["hidden.weight"].shape, weights["output.weight"].shape
        model = PerceptronModel(width, hidden, labels)
        model.load_state_dict(weights)
    except (SafetensorError, KeyError, ValueError, RuntimeError) as error:
        raise ClassifierError(f"{path.name} does not hold a perceptron: {error}") from error
    return model.eval()
