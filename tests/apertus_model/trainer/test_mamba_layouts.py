"""A model with layers of Mamba-2 trains in every layout as on one process."""

from __future__ import annotations

from pathlib import Path

import pytest

from specs.mamba import Mamba
from tests.apertus_model.harness import Result
from tests.apertus_model.trainer.layouts import (
    ALL,
    DEEP,
    Differences,
    assert_compiled_layers_train_alike,
    assert_recomputation_changes_no_bit,
    run,
    spec_of,
)
from tests.machine import compiles, slow

HYBRID = DEEP.model_copy(update={"mamba": Mamba(layers=[0, 2], chunk=8)})


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Result:
    return run(tmp_path_factory.mktemp("alone"), spec_of(model=HYBRID), states=True)


@pytest.mark.parametrize(
    "name", ["TP with SP", *map(slow, ("FSDP", "TP", "HSDP", "FSDP x TP with SP", "DDP", "PP"))]
)
def test_a_layout_gives_the_losses_and_the_weights_of_one_process(
    tmp_path: Path, alone: Result, name: str
) -> None:
    processes, parallel = ALL[name]
    result = run(tmp_path, spec_of(model=HYBRID, parallel=parallel, micro_batch_size=2), processes)
    found = Differences.between(result, alone)
    assert found.loss < 2e-6 and found.heldout < 2e-6
    # the first steps of AdEMAMix enlarge what another order of sums rounds
    assert found.grad_norm < 1e-5 and found.weights < 3e-5


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["full", "selective"])
def test_recomputation_changes_no_bit(tmp_path: Path, alone: Result, kind: str) -> None:
    assert_recomputation_changes_no_bit(tmp_path, spec_of(model=HYBRID), kind, kept=alone)


@compiles
@pytest.mark.slow
def test_compiled_layers_train_alike(tmp_path: Path, alone: Result) -> None:
    spec = spec_of(model=HYBRID, validation={"interval": 0})
    assert_compiled_layers_train_alike(tmp_path, spec, alone)
