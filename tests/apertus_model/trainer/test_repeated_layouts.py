"""A model whose layers run several times trains in every layout as on one process."""

from __future__ import annotations

from pathlib import Path

import pytest

from specs.launch import Parallel
from specs.repeats import Repeats
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
from tests.machine import compiles

REPEATED = DEEP.model_copy(update={"repeats": Repeats(start=1, layers=2, times=3)})
CONTROL = DEEP.model_copy(update={"repeats": Repeats(start=1, layers=2, times=2, keys="own")})
SLOW = ("FSDP", "TP", "TP with SP", "HSDP", "FSDP x TP with SP", "DDP")


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Result:
    return run(tmp_path_factory.mktemp("alone"), spec_of(model=REPEATED), states=True)


@pytest.mark.slow
@pytest.mark.parametrize("name", SLOW)
def test_a_layout_gives_the_losses_and_the_weights_of_one_process(
    tmp_path: Path, alone: Result, name: str
) -> None:
    """In micro-batches, so that gradients of a layer are added over its runs and over them."""
    processes, parallel = ALL[name]
    result = run(tmp_path, spec_of(model=REPEATED, parallel=parallel, micro_batch_size=2), processes)
    found = Differences.between(result, alone)
    assert found.loss < 2e-6 and found.heldout < 2e-6
    # sums over runs and ranks have another order, which the first steps of AdEMAMix enlarge
    assert found.grad_norm < 1e-5 and found.weights < 3e-5


@pytest.mark.slow
def test_the_control_without_old_keys_shares_sequences_among_processes(tmp_path: Path) -> None:
    processes, parallel = ALL["CP"]
    reference = run(tmp_path / "one", spec_of(model=CONTROL))
    result = run(tmp_path / "two", spec_of(model=CONTROL, parallel=parallel), processes)
    found = Differences.between(result, reference)
    assert found.loss < 2e-6 and found.grad_norm < 1e-5 and found.weights < 3e-5


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "name"), [("full", None), ("selective", None), ("full", "FSDP")])
def test_recomputation_changes_no_bit(tmp_path: Path, alone: Result, kind: str, name: str | None) -> None:
    processes, parallel = ALL[name] if name else (1, Parallel())
    spec = spec_of(model=REPEATED, parallel=parallel)
    assert_recomputation_changes_no_bit(tmp_path, spec, kind, processes, None if name else alone)


@compiles
@pytest.mark.slow
def test_compiled_layers_train_alike(tmp_path: Path, alone: Result) -> None:
    assert_compiled_layers_train_alike(tmp_path, spec_of(model=REPEATED), alone)
