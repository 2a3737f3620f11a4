"""Sharpness beside the whole Hessian of a tiny model in float64, and on every layout."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from apertus_model.evaluation.sharpness import sharpness, signs
from apertus_model.model.feed_forward import XIELU
from apertus_model.model.model import model_config
from apertus_model.progress import Progress
from apertus_model.trainer.checkpoint import load_tensors
from apertus_model.trainer.evaluator import Evaluator
from apertus_model.trainer.inference import load_evaluator
from specs.launch import Parallel
from specs.model import ModelSpec
from tests.apertus_model.harness import SyntheticSamples, segment, train
from tests.apertus_model.ranks import in_kept_processes
from tests.apertus_model.trainer.checkpoints import LocalCheckpoint

TINY = ModelSpec(
    dim=4, n_layers=1, n_heads=2, n_kv_heads=2, head_dim=4, ffn_dim=4, vocab_size=128, init_std=0.3
)
SAMPLES = [SyntheticSamples()[index] for index in range(3)]  # some labels are masked
PROBES, SEED = 8, 5


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    train(folder, segment(model=TINY, end_step=2, checkpoint={"interval": 2}))
    return folder


def on_ranks(
    folder: Path,
    checkpoints: Path,
    work: Callable[[Evaluator], Any],
    processes: int = 1,
    parallel: Parallel | None = None,
) -> Any:
    """`work(evaluator)` on every rank; the result of rank 0."""

    def run(rank: int) -> Any:
        return work(
            load_evaluator(
                TINY,
                LocalCheckpoint(checkpoints / "step-2"),
                sequence_length=16,
                attention="sdpa",
                parallel=parallel or Parallel(),
                batch_size=2,
                scratch=str(folder),
            )
        )

    return in_kept_processes(folder / "ranks", run, processes)[0]


def measure(evaluator: Evaluator, **changes: Any) -> dict[str, float]:
    return sharpness(
        evaluator, SAMPLES, **{"probes": PROBES, "seed": SEED, "progress": Progress(None), **changes}
    )


def xielu(activation: XIELU, x: torch.Tensor) -> torch.Tensor:
    """The formula of the paper; the engine's own can be differentiated once only."""
    slope_p, slope_n = F.softplus(activation.alpha_p), 0.5 + F.softplus(activation.alpha_n)
    return torch.where(x > 0, slope_p * x * x, slope_n * (torch.expm1(x) - x)) + 0.5 * x


def hessian(model: torch.nn.Module) -> tuple[float, torch.Tensor]:
    """(loss, its Hessian) of all parameters, one after the other, by differentiating twice."""
    for module in model.modules():
        if isinstance(module, XIELU):
            module.forward = partial(xielu, module)  # type: ignore[method-assign]
    tokens, labels, positions = (
        torch.from_numpy(np.stack([getattr(sample, name) for sample in SAMPLES]))
        for name in ("input", "labels", "positions")
    )
    parameters = list(model.parameters())
    with sdpa_kernel(SDPBackend.MATH):
        loss = F.cross_entropy(model(tokens, positions).flatten(0, 1), labels.flatten(), ignore_index=-100)
        gradient = torch.cat(
            [part.flatten() for part in torch.autograd.grad(loss, parameters, create_graph=True)]
        )
        rows = [
            torch.autograd.grad(slope, parameters, retain_graph=True, allow_unused=True) for slope in gradient
        ]
    whole = [
        [torch.zeros_like(p) if part is None else part for part, p in zip(row, parameters, strict=True)]
        for row in rows
    ]
    return float(loss), torch.stack([torch.cat([part.flatten() for part in row]) for row in whole])


@pytest.fixture(scope="module")
def exact(checkpoints: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The Hessian, and what is measured, in float64."""

    def work(evaluator: Evaluator) -> dict[str, Any]:
        plain = model_config(TINY, sequence_length=16, attention="sdpa").build()
        state = dict(plain.state_dict())
        load_tensors(state, LocalCheckpoint(checkpoints / "step-2"))
        plain.load_state_dict(state)
        evaluator.model = plain.double()  # the engine's own computes in float32
        before = [parameter.detach().clone() for parameter in evaluator.model.parameters()]
        found = measure(evaluator, step=1e-4)
        unchanged = all(torch.equal(a, b) for a, b in zip(before, evaluator.model.parameters(), strict=True))
        vectors = [
            torch.cat(
                [
                    signs(p, name, zlib.crc32(f"{SEED}/{probe}".encode())).flatten()
                    for name, p in evaluator.model.named_parameters()
                ]
            )
            for probe in range(PROBES)
        ]
        loss, whole = hessian(evaluator.model)
        return {
            "found": found,
            "unchanged": unchanged,
            "vectors": torch.stack(vectors),
            "loss": loss,
            "hessian": whole,
        }

    return on_ranks(tmp_path_factory.mktemp("exact"), checkpoints, work)  # type: ignore[no-any-return]  # what `work` returns


def test_the_mean_over_the_probes_is_that_of_the_quadratic_forms_of_the_whole_hessian(
    exact: dict[str, Any],
) -> None:
    found, whole, vectors = exact["found"], exact["hessian"], exact["vectors"]
    forms = torch.einsum("pi,ij,pj->p", vectors, whole, vectors)
    assert torch.allclose(whole, whole.T, atol=1e-6)
    assert found["sharpness/trace"] == pytest.approx(forms.mean().item(), rel=1e-4)
    assert found["loss"] == pytest.approx(exact["loss"], rel=1e-7)
    assert found["parameters"] == len(whole) == TINY.parameters
    assert found["sharpness"] == pytest.approx(found["sharpness/trace"] / TINY.parameters)


def test_the_estimate_lies_within_its_standard_error_of_the_exact_trace(exact: dict[str, Any]) -> None:
    whole = exact["hessian"]
    trace = whole.trace().item()
    variance = 2 * (whole.square().sum() - whole.diagonal().square().sum()).item()
    error = math.sqrt(variance / PROBES)
    assert error < 0.5 * abs(trace)
    assert abs(exact["found"]["sharpness/trace"] - trace) < 3 * error
    assert exact["found"]["sharpness/low"] < exact["found"]["sharpness"] < exact["found"]["sharpness/high"]


def test_signs_are_as_often_one_as_minus_one_and_independent_of_each_other(exact: dict[str, Any]) -> None:
    vectors = exact["vectors"]
    assert set(vectors.unique().tolist()) == {-1.0, 1.0}
    correlation = vectors @ vectors.T / vectors.shape[1]
    assert (correlation - torch.eye(PROBES)).abs().max() < 4 / math.sqrt(vectors.shape[1])
    assert vectors.mean(1).abs().max() < 4 / math.sqrt(vectors.shape[1])


def test_the_weights_are_afterwards_what_they_were(exact: dict[str, Any]) -> None:
    assert exact["unchanged"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "parallel",
    [Parallel(), Parallel(dp_replicate=2, dp_shard=1), Parallel(cp=2), Parallel(tp=2)],
)
def test_the_layout_changes_nothing(
    tmp_path: Path, checkpoints: Path, exact: dict[str, Any], parallel: Parallel
) -> None:
    found = on_ranks(tmp_path, checkpoints, measure, 2, parallel)
    assert found["sharpness/trace"] == pytest.approx(exact["found"]["sharpness/trace"], rel=2e-3)  # float32
