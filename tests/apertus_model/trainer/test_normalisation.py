"""The loss of a step is the mean over its kept labels, wherever they fall: ranks and micro-batches with
many, with one, with none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from apertus_model.model.model import model_config
from specs.launch import Parallel
from tests.apertus_model.harness import (
    MODEL,
    ListedSamples,
    WeightedSamples,
    difference,
    losses,
    segment,
    train,
)
from tests.machine import slow
from tests.numerics import Numerics

# labels by place in the batch: with two processes, the second has none in its first micro-batch
KEPT = {0: 16, 1: 1, 2: 0, 3: 0}


def thinned(sample: Any, index: int) -> Any:
    labels = sample.input * 3 % 128
    labels[KEPT[index % 4] :] = -100
    return sample._replace(labels=labels)


class UnevenSamples(ListedSamples):
    def __getitem__(self, index: int) -> Any:
        return thinned(super().__getitem__(index), index)


class UnevenWeightedSamples(WeightedSamples):
    def __getitem__(self, index: int) -> Any:
        return thinned(super().__getitem__(index), index)


KINDS: dict[str, Any] = {"pretrain": UnevenSamples, "sft": UnevenWeightedSamples}


def spec_of(kind: str, **changes: Any) -> Any:
    further = {"prompt_weight": 0.25} if kind == "sft" else {}
    return segment(kind, end_step=2, **further, **changes)


def published(kind: str) -> tuple[float, float]:
    """Loss of the first step and norm of its gradient, all rows at once and all logits in float64."""
    samples = [KINDS[kind]()[index] for index in range(4)]
    model = model_config(MODEL, sequence_length=16, attention="sdpa", seed=7).build()
    model.init_weights()

    def stacked(name: str) -> torch.Tensor:
        return torch.from_numpy(np.stack([getattr(sample, name) for sample in samples]))

    tokens, positions, labels = (stacked(name) for name in ("input", "positions", "labels"))
    weights = stacked("weights").double() if kind == "sft" else torch.ones(labels.shape, dtype=torch.float64)
    log_p = (
        model(tokens, positions).double().log_softmax(-1).gather(-1, labels.clamp(min=0)[..., None])[..., 0]
    )
    kept = labels >= 0
    loss = -(log_p * weights)[kept].sum() / weights[kept].sum()
    loss.backward()
    squares = [
        parameter.grad.double().square().sum()
        for parameter in model.parameters()
        if parameter.grad is not None
    ]
    return loss.item(), torch.stack(squares).sum().sqrt().item()


LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one pass": (1, {}),
    "micro-batches of two": (1, {"micro_batch_size": 2}),
    "micro-batches of one": (1, {"micro_batch_size": 1}),
    "two processes, one without a label": (2, {}),
    "two processes, micro-batches of one": (2, {"micro_batch_size": 1}),
    "two replicas": (2, {"parallel": Parallel(dp_replicate=2)}),
    "two halves of each row": (2, {"parallel": Parallel(cp=2)}),
    "two halves of the vocabulary": (2, {"parallel": Parallel(tp=2, sequence_parallel=True)}),
}


@pytest.mark.parametrize("kind", ["pretrain", slow("sft")])
def test_where_labels_are_kept_changes_neither_loss_nor_gradient(
    tmp_path: Path, numerics: Numerics, kind: str
) -> None:
    loss, norm = published(kind)
    reference = None
    for name, (processes, changes) in LAYOUTS.items():
        spec = spec_of(kind, **changes)
        result = train(tmp_path / name, spec, processes=processes, data=KINDS[kind], chunk_tokens=5)[0]
        for what, metric, expected, allowed in (
            ("loss", "loss", loss, 1e-6),
            ("gradient norm", "grad_norm", norm, 1e-5),
        ):
            numerics(
                "losses",
                f"{what} of a step with unevenly kept labels, micro-batches, FSDP, replicas, CP, TP with SP,"
                " relative",
                source="-sum w ln p / sum w over the global batch",
                against="all rows at once, log-softmax in float64",
                difference=abs(result.rows[0][metric] / expected - 1),
                allowed=allowed,
            )
        reference = reference or result
        assert losses(result) == pytest.approx(losses(reference), rel=1e-5), name
        assert difference(result.weights, reference.weights) < 1e-4, name


def test_a_step_without_any_kept_label_is_an_error(tmp_path: Path) -> None:
    class Nothing(ListedSamples):
        def __getitem__(self, index: int) -> Any:
            return thinned(super().__getitem__(index), 2)

    with pytest.raises(RuntimeError, match="the loss is not finite"):
        train(tmp_path, segment(end_step=1), data=Nothing)
