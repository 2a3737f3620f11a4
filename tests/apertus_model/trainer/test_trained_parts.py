"""A stage that trains some parameters: the others keep their bits and have no optimizer states."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from specs.launch import Parallel
from tests.apertus_model.harness import losses, same
from tests.apertus_model.trainer.test_layouts import ALL, DEEP, Differences, at, run, spec_of

UPPER = ["layers.[34].*", "norm.weight"]


def trained(name: str) -> bool:
    return name.startswith(("layers.3.", "layers.4.", "norm."))


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("alone")
    return folder, run(folder, spec_of(model=DEEP, trainable=UPPER, checkpoint={"interval": 2}), states=True)


def test_only_what_is_named_changes_and_has_states(tmp_path: Path, alone: tuple[Path, Any]) -> None:
    found = alone[1]
    other = run(tmp_path, spec_of(model=DEEP, trainable=["lm_head.weight"]))
    changed = {name for name, weight in found.weights.items() if not torch.equal(weight, other.weights[name])}
    assert changed == {name for name in found.weights if trained(name)} | {"lm_head.weight"}
    states = {name.removeprefix("state.").rpartition(".")[0] for name in found.optimizer}
    assert states == {name for name in found.weights if trained(name)}


def test_a_resumed_run_has_the_same_bits(tmp_path: Path, alone: tuple[Path, Any]) -> None:
    folder, whole = alone
    spec = spec_of(model=DEEP, trainable=UPPER)
    resumed = run(tmp_path, spec, source=at(folder), begin_step=2, states=True)
    assert losses(resumed) == losses(whole)[2:]
    assert same(resumed.weights, whole.weights) and same(resumed.optimizer, whole.optimizer)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) for name in ("FSDP", "TP with SP")]
)
def test_a_layout_gives_the_losses_and_the_weights_of_one_process(
    tmp_path: Path, alone: tuple[Path, Any], name: str
) -> None:
    processes, parallel = ALL[name]
    spec = spec_of(model=DEEP, trainable=UPPER, parallel=parallel, micro_batch_size=2)
    found = Differences.between(run(tmp_path, spec, processes), alone[1])
    assert found.loss < 2e-6 and found.grad_norm < 1e-5 and found.weights < 1e-5


def test_recomputation_changes_no_bit(tmp_path: Path, alone: tuple[Path, Any]) -> None:
    spec = spec_of(model=DEEP, trainable=UPPER, activation_checkpointing="full", parallel=Parallel())
    assert same(run(tmp_path, spec).weights, alone[1].weights)
