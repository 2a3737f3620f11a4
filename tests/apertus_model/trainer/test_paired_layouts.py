"""A model with paired layers trains in every layout as on one process, with fewer exchanges."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from specs.launch import Parallel
from specs.layer_pairs import LayerPairs
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

PAIRED = DEEP.model_copy(update={"layer_pairs": LayerPairs(start=1, layers=4)})
LAYOUTS = ("TP with SP", "FSDP", "TP", "CP", "FSDP x TP with SP")


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Result:
    return run(tmp_path_factory.mktemp("alone"), spec_of(model=PAIRED), states=True)


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_layout_gives_the_losses_and_the_weights_of_one_process(
    tmp_path: Path, alone: Result, name: str
) -> None:
    processes, parallel = ALL[name]
    result = run(tmp_path, spec_of(model=PAIRED, parallel=parallel, micro_batch_size=2), processes)
    found = Differences.between(result, alone)
    assert found.loss < 2e-6 and found.heldout < 2e-6
    # the sum over ranks and layers has another order, which the first steps of AdEMAMix enlarge
    assert found.grad_norm < 1e-6 and found.weights < 3e-5


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "name"), [("full", None), ("selective", None), ("full", "FSDP")])
def test_recomputation_changes_no_bit(tmp_path: Path, alone: Result, kind: str, name: str | None) -> None:
    processes, parallel = ALL[name] if name else (1, Parallel())
    spec = spec_of(model=PAIRED, parallel=parallel)
    assert_recomputation_changes_no_bit(tmp_path, spec, kind, processes, None if name else alone)


@compiles
@pytest.mark.slow
def test_compiled_layers_train_alike(tmp_path: Path, alone: Result) -> None:
    assert_compiled_layers_train_alike(tmp_path, spec_of(model=PAIRED), alone, weights=3e-5)


class Exchanges(TorchDispatchMode):
    """Counts the collectives of tensors, which DTensors call."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(one, DTensor) for one in types):
            return NotImplemented
        name = func.overloadpacket.__name__
        if func.namespace == "_c10d_functional" and not name.startswith(("_", "wait")):
            self.found[name] += 1
        return func(*args, **(kwargs or {}))


def exchanges(folder: Path, model: Any, **layout: Any) -> Counter[str]:
    """The collectives of the layers in a forward pass under TP 2, by their names."""
    folder.mkdir()

    def count(trainer: Any) -> None:
        (model,) = trainer.model_parts
        tokens = torch.zeros(1, 32, dtype=torch.int64)
        with torch.no_grad(), Exchanges() as counted:
            model(tokens)
        if torch.distributed.get_rank() == 0:
            (folder / "counts").write_text(json.dumps(counted.found))

    parallel = Parallel(tp=2, **layout)
    spec = spec_of(model=model, parallel=parallel, end_step=1, validation={"interval": 0})
    run(folder, spec, 2, inspect=count)
    return Counter(json.loads((folder / "counts").read_text()))


def test_a_pair_makes_two_sums_over_tensor_parallel_processes_instead_of_four(tmp_path: Path) -> None:
    plain = exchanges(tmp_path / "plain", DEEP)
    paired = exchanges(tmp_path / "paired", PAIRED)
    assert plain["all_reduce"] >= 2 * DEEP.n_layers
    assert plain - paired == {"all_reduce": 2 * 2} and not paired - plain


def gathered(folder: Path, model: Any) -> int:
    """Numbers that FSDP gathers for a forward and a backward pass."""
    folder.mkdir()

    def count(trainer: Any) -> None:
        sizes: list[int] = []
        plain = torch.distributed.all_gather_single  # as FSDP calls it

        def counting(output: torch.Tensor, *arguments: Any, **named: Any) -> Any:
            sizes.append(output.numel())
            return plain(output, *arguments, **named)

        (model,) = trainer.model_parts
        tokens = torch.zeros(1, 32, dtype=torch.int64)
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(torch.distributed, "all_gather_single", counting)
            model(tokens).sum().backward()
        model.zero_grad()
        if torch.distributed.get_rank() == 0:
            (folder / "gathered").write_text(str(sum(sizes)))

    run(folder, spec_of(model=model, end_step=1, validation={"interval": 0}), 2, inspect=count)
    return int((folder / "gathered").read_text())


@pytest.mark.slow
def test_the_weights_of_a_pair_are_gathered_as_often_as_those_of_any_layer(tmp_path: Path) -> None:
    """But for two norms of each of its layers, whose gathers are two."""
    plain = gathered(tmp_path / "plain", DEEP)
    paired = gathered(tmp_path / "paired", PAIRED)
    assert plain > 1.5 * DEEP.parameters
    assert plain < paired <= plain + 2 * 4 * 2 * DEEP.dim


@pytest.mark.slow
def test_with_sequence_parallelism_it_scatters_two_sums_instead_of_four(tmp_path: Path) -> None:
    plain = exchanges(tmp_path / "plain", DEEP, sequence_parallel=True)
    paired = exchanges(tmp_path / "paired", PAIRED, sequence_parallel=True)
    assert plain - paired == {"reduce_scatter_tensor": 2 * 2} and not paired - plain
