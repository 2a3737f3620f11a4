"""The diagonal of Gauss and Newton, estimated on drawn labels."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from apertus_model.losses.cross_entropy import IGNORE_INDEX, LastStates
from apertus_model.model.model import model_config
from apertus_model.optimizers.benchmark import sophia
from specs.launch import Parallel
from specs.optimizer import OptimizerSpec
from tests.apertus_model.harness import MODEL, SyntheticSamples, segment, train
from tests.machine import slow
from tests.numerics import Numerics

Tensor = torch.Tensor
LAYOUTS = {
    "accumulation": (1, {"micro_batch_size": 1}),
    "fsdp": (2, {"micro_batch_size": 1}),
    "tensor parallel": (2, {"parallel": Parallel(tp=2)}),
    "context parallel": (2, {"parallel": Parallel(cp=2)}),
    "replicas": (2, {"parallel": Parallel(dp_replicate=2, dp_shard=1)}),
}


def engine(folder: Path, processes: int = 1, **changes: Any) -> dict[str, Tensor]:
    """The optimizer's state after one step."""
    spec = OptimizerSpec(name="sophia", lr=1e-3).resolved({})
    spec = segment(optimizer=spec, end_step=1, **changes)
    return train(folder, spec, processes=processes, states=True)[0].optimizer


def test_the_engine_squares_the_gradient_of_the_mean_loss_on_drawn_labels_times_the_kept_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn_by_place: dict[int, int] = {}
    draw = sophia.draw_labels

    def noting(states: LastStates, places: Tensor, seed: int) -> Tensor:
        drawn = draw(states, places, seed)
        drawn_by_place.update(zip(places.flatten().tolist(), drawn.flatten().tolist(), strict=True))
        torch.save(drawn_by_place, tmp_path / "drawn.pt")
        return drawn

    monkeypatch.setattr(sophia, "draw_labels", noting)
    state = engine(tmp_path, micro_batch_size=1)
    places = torch.load(tmp_path / "drawn.pt")
    rows = [SyntheticSamples()[index] for index in range(4)]
    labels = torch.tensor([[places[row * 16 + column] for column in range(16)] for row in range(4)])
    assert torch.equal(
        labels == IGNORE_INDEX, torch.stack([torch.tensor(row.labels) for row in rows]) == IGNORE_INDEX
    )
    # a new model knows nothing
    assert (labels != torch.stack([torch.tensor(row.labels) for row in rows])).float().mean() > 0.5
    model = model_config(MODEL, sequence_length=16, attention="sdpa", seed=7).build()
    model.init_weights()
    inputs, positions = (
        torch.stack([torch.tensor(getattr(row, name)) for row in rows]) for name in ("input", "positions")
    )
    loss = torch.nn.functional.cross_entropy(
        model(inputs, positions).double().flatten(0, 1), labels.flatten()
    )
    loss.backward()
    tokens = int((labels != IGNORE_INDEX).sum())
    for name, parameter in model.named_parameters():
        expected = 0.01 * tokens * parameter.grad.square()
        torch.testing.assert_close(
            state[f"state.{name}.hessian"], expected, rtol=2e-3, atol=1e-5 * expected.max().item()
        )


@pytest.fixture(scope="module")
def one_process(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tensor]:
    return engine(tmp_path_factory.mktemp("one"))


SLOW = {"accumulation", "fsdp", "replicas"}  # others do it too


@pytest.mark.parametrize("layout", [slow(name) if name in SLOW else name for name in LAYOUTS])
def test_the_estimate_is_the_same_on_every_layout(
    layout: str, one_process: dict[str, Tensor], tmp_path: Path, numerics: Numerics
) -> None:
    processes, changes = LAYOUTS[layout]
    state = engine(tmp_path, processes, **changes)
    assert state.keys() == one_process.keys()
    hessians = {name: value for name, value in one_process.items() if name.endswith(".hessian")}
    numerics(
        "parallelism",
        "Sophia's estimate of the Hessian after a step, relative to a tensor's largest element",
        source="arXiv 2305.14342, algorithm 2",
        against="one process with the whole batch; FSDP, replicas, TP, CP, two processes",
        difference=max(
            ((state[name] - value).abs().max() / value.max()).item() for name, value in hessians.items()
        ),
        allowed=2e-5,
    )
