"""A model with weighted sums of earlier layers trains in every layout as on one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from specs.launch import Parallel
from specs.layer_schedule import DepthAverage
from tests.apertus_model.harness import Result, losses
from tests.apertus_model.trainer.layouts import (
    ALL,
    DEEP,
    Differences,
    assert_compiled_layers_train_alike,
    assert_recomputation_changes_no_bit,
    run,
    spec_of,
)
from tests.machine import compiles

SCHEDULED = DEEP.model_copy(update={"depth_average": DepthAverage(dilation=2, period=3)})
SUMS = {"schedule.sums.3.weight", "schedule.sums.6.weight"}
SLOW = ("TP with SP", "HSDP", "TP", "CP", "FSDP x TP with SP", "TP x CP with SP", "DDP")


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Result]:
    folder = tmp_path_factory.mktemp("alone")
    return folder, run(folder, spec_of(model=SCHEDULED, checkpoint={"interval": 2}), states=True)


@pytest.mark.parametrize("name", ["FSDP", *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)])
def test_a_layout_gives_the_losses_and_the_weights_of_one_process(
    tmp_path: Path, alone: tuple[Path, Result], name: str
) -> None:
    processes, parallel = ALL[name]
    reference = alone[1]
    for weights in (reference.weights[key] for key in SUMS):
        assert (weights[:-1] != 0).all() and weights[-1] != 1, "trained, so no longer a selection"
    result = run(tmp_path, spec_of(model=SCHEDULED, parallel=parallel, micro_batch_size=2), processes)
    found = Differences.between(result, reference)
    assert found.loss < 2e-6 and found.heldout < 2e-6
    assert found.grad_norm < 1e-5 and found.weights < 1e-5


@pytest.mark.parametrize(
    ("kind", "name"), [("full", None), pytest.param("selective", "FSDP", marks=pytest.mark.slow)]
)
def test_recomputation_changes_no_bit(
    tmp_path: Path, alone: tuple[Path, Result], kind: str, name: str | None
) -> None:
    processes, parallel = ALL[name] if name else (1, Parallel())
    spec = spec_of(model=SCHEDULED, parallel=parallel)
    assert_recomputation_changes_no_bit(tmp_path, spec, kind, processes, None if name else alone[1])


@compiles
@pytest.mark.slow
def test_compiled_layers_train_alike(tmp_path: Path, alone: tuple[Path, Result]) -> None:
    assert_compiled_layers_train_alike(tmp_path, spec_of(model=SCHEDULED), alone[1])


def test_the_first_step_is_that_of_the_plain_stack_and_the_sums_are_not_decayed(tmp_path: Path) -> None:
    """The same loss, and a group of the optimizer for the weights of the sums alone."""
    folder = tmp_path / "groups"
    folder.mkdir()

    def note(trainer: Any) -> None:
        for group in trainer.optimizers.optimizers[0].param_groups:
            if SUMS & set(group["param_names"]):
                assert set(group["param_names"]) == SUMS
                (folder / "decay").write_text(str(group["weight_decay"]))

    spec = spec_of(model=SCHEDULED, end_step=1, validation={"interval": 0})
    found = run(tmp_path / "sums", spec, inspect=note)
    plain = run(tmp_path / "plain", spec_of(end_step=1, validation={"interval": 0}))
    assert float((folder / "decay").read_text()) == 0.0
    assert spec.optimizer.weight_decay > 0
    assert losses(found) == losses(plain)
    shared = found.weights.keys() - SUMS
    assert shared == plain.weights.keys()
    # the norm of all gradients, by which they are clipped, has those of the sums in it
    assert found.rows[0]["grad_norm"] > plain.rows[0]["grad_norm"]
    assert all(torch.isfinite(found.weights[name]).all() for name in SUMS)
