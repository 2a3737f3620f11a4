"""Models that are not a plain stack train in every layout as on one process: with layers of Mamba-2, layers
in pairs, repeated layers, weighted sums of earlier layers, and sparse attention."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from apertus_model.model.sparse_attention import draw
from specs.launch import Parallel
from specs.layer_schedule import DepthAverage, LayerPairs, Repeats
from specs.mamba import Mamba
from specs.sparse_attention import Dropped, Hashed
from tests.apertus_model.harness import Result, losses, same
from tests.apertus_model.step_costs import local
from tests.apertus_model.trainer.layouts import (
    ALL,
    DEEP,
    Differences,
    assert_compiled_layers_train_alike,
    assert_recomputation_changes_no_bit,
    at,
    run,
    spec_of,
)
from tests.machine import compiles, slow

SUMS = {"schedule.sums.3.weight", "schedule.sums.6.weight"}
Alone = Callable[[str], tuple[Path, Result]]


def own_heads(trainer: Any) -> None:
    """The random numbers of a rank are those of its heads."""
    ranks = trainer.parallel_dims.tp
    mesh = trainer.parallel_dims.get_optional_mesh("tp")
    rank = 0 if mesh is None else mesh.get_local_rank()
    for part in trainer.model_parts:
        for index, layer in part.layers.items():
            for key, size in layer.attention.sizes.items():
                whole = draw(layer.attention.method, int(index), key, size)
                assert torch.equal(local(getattr(layer.attention, key)), whole.chunk(ranks)[rank])


@dataclass(frozen=True)
class Model:
    """A model, the layouts and recomputations that are tried, and the differences that other orders of sums
    make, which the first steps of AdEMAMix enlarge."""

    changes: dict[str, Any]  # of `DEEP`
    fast: tuple[str, ...] = ()
    slow: tuple[str, ...] = ()
    # what is recomputed, and the layout, if it is not one process
    fast_recomputed: tuple[str, ...] = ()
    slow_recomputed: tuple[str, ...] = ()
    loss: float = 2e-6
    grad_norm: float = 1e-5
    weights: float = 3e-5
    compiled: float | None = 1e-5  # largest difference of the weights of compiled layers; None: not compiled
    inspect: Callable[[Any], None] | None = None

    @property
    def spec(self) -> Any:
        return DEEP.model_copy(update=self.changes)


MODELS = {
    "mamba": Model(
        {"mamba": Mamba(layers=[0, 2], chunk=8)},
        fast=("TP with SP",),
        slow=("FSDP", "TP", "HSDP", "FSDP x TP with SP", "DDP", "PP"),
        slow_recomputed=("full", "selective"),
    ),
    "linear attention": Model(
        {"mamba": Mamba(layers=[0, 2], chunk=8, decay=False)},
        slow=("TP with SP", "FSDP x TP with SP"),
        weights=4e-5,
    ),
    "pairs": Model(
        {"layer_pairs": LayerPairs(start=1, layers=4)},
        slow=("TP with SP", "FSDP", "TP", "CP", "FSDP x TP with SP"),
        slow_recomputed=("full", "selective", "full FSDP"),
        grad_norm=1e-6,
        compiled=3e-5,
    ),
    "repeats": Model(  # gradients of a layer are added over its runs and over micro-batches
        {"repeats": Repeats(start=1, layers=2, times=3)},
        slow=("FSDP", "TP", "TP with SP", "HSDP", "FSDP x TP with SP", "DDP"),
        slow_recomputed=("full", "selective", "full FSDP"),
    ),
    "sums": Model(
        {"depth_average": DepthAverage(dilation=2, period=3)},
        fast=("FSDP",),
        slow=("TP with SP", "HSDP", "TP", "CP", "FSDP x TP with SP", "TP x CP with SP", "DDP"),
        fast_recomputed=("full",),
        slow_recomputed=("selective FSDP",),
        weights=1e-5,
    ),
    # with another seed of `hash`, losses differ by 4e-2; few pairs give a gradient
    "hash": Model(
        {"attention": Hashed(sparse="hash", buckets=4, seed=2)},
        fast=("FSDP",),
        slow=("TP with SP", "PP"),
        fast_recomputed=("full",),
        slow_recomputed=("selective",),
        loss=4e-6,
        weights=1e-4,
        compiled=3e-5,
        inspect=own_heads,
    ),
    "drop": Model(
        {"attention": Dropped(sparse="drop", queries=0.25, keys=0.5, seed=3)},
        slow=("TP with SP", "TP"),
        slow_recomputed=("full",),
        loss=4e-6,
        weights=1e-4,
        compiled=None,
        inspect=own_heads,
    ),
}
PAIRED = MODELS["pairs"].spec
CONTROL = DEEP.model_copy(update={"repeats": Repeats(start=1, layers=2, times=2, keys="own")})


def cases(fast: str, slowly: str) -> Iterator[Any]:
    """The entries of these fields of all models, the latter as slow tests."""
    for name, model in MODELS.items():
        yield from ((name, entry) for entry in getattr(model, fast))
        yield from (slow(name, entry) for entry in getattr(model, slowly))


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Alone:
    """One process, by model, with the folder of its checkpoints."""

    @cache
    def result(name: str) -> tuple[Path, Result]:
        folder = tmp_path_factory.mktemp(name)
        spec = spec_of(model=MODELS[name].spec, checkpoint={"interval": 2})
        return folder, run(folder, spec, states=True)

    return result


@pytest.mark.parametrize(("name", "layout"), cases("fast", "slow"))
def test_a_layout_gives_the_losses_and_the_weights_of_one_process(
    tmp_path: Path, alone: Alone, name: str, layout: str
) -> None:
    model, reference, (processes, parallel) = MODELS[name], alone(name)[1], ALL[layout]
    for weights in (reference.weights[key] for key in SUMS & reference.weights.keys()):
        assert (weights[:-1] != 0).all() and weights[-1] != 1, "trained, so no longer a selection"
    spec = spec_of(model=model.spec, parallel=parallel, micro_batch_size=2)
    inspected = {} if model.inspect is None else {"inspect": model.inspect}
    differences = Differences.between(run(tmp_path, spec, processes, **inspected), reference)
    assert differences.loss < model.loss and differences.heldout < 2e-6
    assert differences.grad_norm < model.grad_norm and differences.weights < model.weights


@pytest.mark.parametrize(("name", "recomputed"), cases("fast_recomputed", "slow_recomputed"))
def test_recomputation_changes_no_bit(tmp_path: Path, alone: Alone, name: str, recomputed: str) -> None:
    kind, _, layout = recomputed.partition(" ")
    processes, parallel = ALL[layout] if layout else (1, Parallel())
    spec = spec_of(model=MODELS[name].spec, parallel=parallel)
    kept = None if layout else alone(name)[1]
    assert_recomputation_changes_no_bit(tmp_path, spec, kind, processes, kept)


@compiles
@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, model in MODELS.items() if model.compiled])
def test_compiled_layers_train_alike(tmp_path: Path, alone: Alone, name: str) -> None:
    changes = {"validation": {"interval": 0}} if name == "mamba" else {}
    spec = spec_of(model=MODELS[name].spec, **changes)
    assert_compiled_layers_train_alike(tmp_path, spec, alone(name)[1], weights=MODELS[name].compiled or 0.0)


@pytest.mark.slow
def test_a_resumed_run_has_the_bits_of_an_uninterrupted_one(tmp_path: Path, alone: Alone) -> None:
    folder, whole = alone("hash")
    rest = run(tmp_path, spec_of(model=MODELS["hash"].spec), source=at(folder), begin_step=2)
    assert losses(rest) == losses(whole)[2:] and same(rest.weights, whole.weights)


@pytest.mark.slow
def test_the_control_without_old_keys_shares_sequences_among_processes(tmp_path: Path) -> None:
    processes, parallel = ALL["CP"]
    reference = run(tmp_path / "one", spec_of(model=CONTROL))
    result = run(tmp_path / "two", spec_of(model=CONTROL, parallel=parallel), processes)
    differences = Differences.between(result, reference)
    assert differences.loss < 2e-6 and differences.grad_norm < 1e-5 and differences.weights < 3e-5


def test_the_first_step_is_that_of_the_plain_stack_and_the_sums_are_not_decayed(tmp_path: Path) -> None:
    """The same loss, and a group of the optimizer for the weights of the sums alone."""
    folder = tmp_path / "groups"
    folder.mkdir()

    def note(trainer: Any) -> None:
        for group in trainer.optimizers.optimizers[0].param_groups:
            if SUMS & set(group["param_names"]):
                assert set(group["param_names"]) == SUMS
                (folder / "decay").write_text(str(group["weight_decay"]))

    spec = spec_of(model=MODELS["sums"].spec, end_step=1, validation={"interval": 0})
    summed = run(tmp_path / "sums", spec, inspect=note)
    plain = run(tmp_path / "plain", spec_of(end_step=1, validation={"interval": 0}))
    assert float((folder / "decay").read_text()) == 0.0
    assert spec.optimizer.weight_decay > 0
    assert losses(summed) == losses(plain)
    shared = summed.weights.keys() - SUMS
    assert shared == plain.weights.keys()
    # the norm of all gradients, by which they are clipped, has those of the sums in it
    assert summed.rows[0]["grad_norm"] > plain.rows[0]["grad_norm"]
    assert all(torch.isfinite(summed.weights[name]).all() for name in SUMS)


class Exchanges(TorchDispatchMode):
    """Counts the collectives of tensors, which DTensors call."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        name = func.overloadpacket.__name__
        if func.namespace == "_c10d_functional" and not name.startswith(("_", "wait")):
            self.counts[name] += 1
        return func(*args, **(kwargs or {}))


def counted(count: Callable[[Any], Any], folder: Path, model: Any, parallel: Parallel) -> Any:
    """What `count` finds in a model that two processes share, on the first of them."""
    folder.mkdir()

    def note(trainer: Any) -> None:
        (model,) = trainer.model_parts
        counts = count(model)
        if torch.distributed.get_rank() == 0:
            (folder / "counts").write_text(json.dumps(counts))

    spec = spec_of(model=model, parallel=parallel, end_step=1, validation={"interval": 0})
    run(folder, spec, 2, inspect=note)
    return json.loads((folder / "counts").read_text())


def exchanges(folder: Path, model: Any, **layout: Any) -> Counter[str]:
    """The collectives of the layers in a forward pass under TP 2, by their names."""

    def count(model: Any) -> Counter[str]:
        with torch.no_grad(), Exchanges() as exchanged:
            model(torch.zeros(1, 32, dtype=torch.int64))
        return exchanged.counts

    return Counter(counted(count, folder, model, Parallel(tp=2, **layout)))


def test_a_pair_makes_two_sums_over_tensor_parallel_processes_instead_of_four(tmp_path: Path) -> None:
    plain = exchanges(tmp_path / "plain", DEEP)
    paired = exchanges(tmp_path / "paired", PAIRED)
    assert plain["all_reduce"] >= 2 * DEEP.n_layers
    assert plain - paired == {"all_reduce": 2 * 2} and not paired - plain


@pytest.mark.slow
def test_with_sequence_parallelism_it_scatters_two_sums_instead_of_four(tmp_path: Path) -> None:
    plain = exchanges(tmp_path / "plain", DEEP, sequence_parallel=True)
    paired = exchanges(tmp_path / "paired", PAIRED, sequence_parallel=True)
    assert plain - paired == {"reduce_scatter_tensor": 2 * 2} and not paired - plain


def gathered(model: Any) -> int:
    """Numbers that FSDP gathers for a forward and a backward pass."""
    sizes: list[int] = []
    plain = torch.distributed.all_gather_single  # as FSDP calls it

    def counting(output: torch.Tensor, *arguments: Any, **named: Any) -> Any:
        sizes.append(output.numel())
        return plain(output, *arguments, **named)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(torch.distributed, "all_gather_single", counting)
        model(torch.zeros(1, 32, dtype=torch.int64)).sum().backward()
    model.zero_grad()
    return sum(sizes)


@pytest.mark.slow
def test_the_weights_of_a_pair_are_gathered_as_often_as_those_of_any_layer(tmp_path: Path) -> None:
    """But for two norms of each of its layers, whose gathers are two."""
    numbers = partial(counted, gathered, parallel=Parallel())
    plain, paired = numbers(tmp_path / "plain", DEEP), numbers(tmp_path / "paired", PAIRED)
    assert plain > 1.5 * DEEP.parameters
    assert plain < paired <= plain + 2 * 4 * 2 * DEEP.dim
