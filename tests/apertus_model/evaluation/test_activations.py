"""The sparsity of activations beside the formulas in float64 on a plain model, and on every layout."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch

from apertus_model.evaluation.activations import measures, sparsity
from apertus_model.model.model import model_config
from apertus_model.trainer.checkpoint import load_tensors
from apertus_model.trainer.inference import load_evaluator
from specs.launch import Parallel
from specs.model import ModelSpec
from tests.apertus_model.harness import SyntheticSamples, segment, train
from tests.apertus_model.ranks import in_kept_processes
from tests.apertus_model.trainer.checkpoints import LocalCheckpoint

MODEL = ModelSpec(
    dim=4, n_layers=3, n_heads=2, n_kv_heads=2, head_dim=4, ffn_dim=8, vocab_size=128, init_std=0.3
)
SAMPLES = [SyntheticSamples()[index] for index in range(3)]  # some labels are masked


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> LocalCheckpoint:
    folder = tmp_path_factory.mktemp("trained")
    train(folder, segment(model=MODEL, end_step=2, checkpoint={"interval": 2}))
    return LocalCheckpoint(folder / "step-2")


@pytest.fixture(scope="module")
def truth(checkpoint: LocalCheckpoint, tmp_path_factory: pytest.TempPathFactory) -> dict[str, float]:
    folder = tmp_path_factory.mktemp("plain")
    return in_kept_processes(folder, lambda rank: expected(checkpoint), 1)[0]  # type: ignore[no-any-return]


def test_equal_activations_have_no_sparsity_and_a_single_one_has_all_of_it() -> None:
    rows = torch.tensor([[3.0, -3, 3, 3], [0, -2, 0, 0], [1, 0.009, -0.011, 0]])
    sizes = [1, 0.009, 0.011, 0]
    hoyer = (2 - sum(sizes) / math.sqrt(sum(size**2 for size in sizes))) / (2 - 1)
    assert measures(rows).flatten().tolist() == pytest.approx([0, 0, 1, 0.75, hoyer, 0.5])
    assert measures(torch.zeros(1, 4)).tolist() == measures(torch.ones(1, 1)).tolist() == [[0, 0]]


@pytest.mark.parametrize(
    "parallel",
    [
        Parallel(),
        *(
            pytest.param(layout, marks=pytest.mark.slow)
            for layout in (Parallel(dp_replicate=2, dp_shard=1), Parallel(dp_shard=2), Parallel(cp=2))
        ),
    ],
)
def test_the_sparsity_of_each_layer_is_the_mean_over_the_labels(
    tmp_path: Path, checkpoint: LocalCheckpoint, truth: dict[str, float], parallel: Parallel
) -> None:
    def run(rank: int) -> dict[str, float]:
        evaluator = load_evaluator(
            MODEL, checkpoint, sequence_length=16, attention="sdpa", parallel=parallel, batch_size=2,
            scratch=str(tmp_path),
        )  # fmt: skip
        return sparsity(evaluator, SAMPLES)

    processes = max(parallel.dp_replicate, parallel.dp_shard, parallel.cp)
    found = in_kept_processes(tmp_path / "ranks", run, processes)[0]
    assert len(truth) == 2 * 3 + 2 and found == pytest.approx(truth, rel=1e-4)


def expected(checkpoint: LocalCheckpoint) -> dict[str, float]:
    """One label after the other, from what a plain model of float64 puts into its layers."""
    plain = model_config(MODEL, sequence_length=16, attention="sdpa").build()
    state = dict(plain.state_dict())
    load_tensors(state, checkpoint)
    plain.load_state_dict(state)
    inputs: dict[str, np.ndarray] = {}
    for number, layer in plain.layers.items():
        layer.feed_forward.down_proj.register_forward_pre_hook(
            lambda _, given, number=number: inputs.__setitem__(number, given[0].detach().numpy())
        )
    tokens, positions = (
        torch.from_numpy(np.stack([getattr(sample, name) for sample in SAMPLES]))
        for name in ("input", "positions")
    )
    plain.double()(tokens, positions)
    metrics: dict[str, float] = {}
    for number, rows in inputs.items():
        hoyer, small = [], []
        for sample, row in zip(SAMPLES, rows, strict=True):
            for label, place in zip(sample.labels, np.abs(row), strict=True):
                if label != -100:
                    root = math.sqrt(len(place))
                    hoyer.append((root - sum(place) / math.sqrt(sum(place**2))) / (root - 1))
                    small.append(sum(value < max(place) / 100 for value in place) / len(place))
        metrics |= {f"sparsity/layer/{number}": np.mean(hoyer), f"near_zero/layer/{number}": np.mean(small)}
    for name in ("sparsity", "near_zero"):
        metrics[name] = float(np.mean([metrics[f"{name}/layer/{number}"] for number in range(3)]))
    return metrics
