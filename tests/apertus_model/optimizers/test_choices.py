"""Every `optimizer.name` in the engine: it trains, resumes from a checkpoint in the same bits, and
computes the same on two processes."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from apertus_model.model.model import model_config
from apertus_model.trainer.checkpoint import CheckpointSource, load_tensors
from apertus_model.trainer.config import trainer_config
from apertus_model.trainer.lifecycle import Lifecycle
from apertus_model.trainer.optimizer import Optimizers, optimizer_config
from specs.capabilities import OPTIMIZERS
from specs.errors import StageError
from specs.launch import Parallel
from specs.optimizer import OptimizerSpec, refused_layout
from specs.schedule import Schedule
from tests.apertus_model.harness import (
    MODEL,
    Data,
    FolderStorage,
    Recorder,
    Result,
    SyntheticSamples,
    difference,
    full,
    same,
    segment,
    train,
)
from tests.apertus_model.ranks import in_kept_processes
from tests.apertus_model.trainer.checkpoints import LocalCheckpoint
from tests.numerics import Numerics, largest_difference

RATES = {"lion": 1e-3, "signum": 1e-3, "sophia": 3e-3, "muon": 2e-2, "prodigy": 1.0}
VARIANTS = {"ademamix in bfloat16": {"name": "ademamix", "state_dtype": "bfloat16"}}
CHOICES = [*OPTIMIZERS, *VARIANTS]
STEPS, HALF = 6, 3


def optimizer(choice: str, **changes: Any) -> OptimizerSpec:
    fields = VARIANTS.get(choice, {"name": choice})
    short = {"ademamix": {"alpha_warmup": 10, "beta3_warmup": 10}, "sophia": {"hessian_interval": 2}}.get(
        fields["name"], {}
    )
    return OptimizerSpec(**{**fields, "lr": RATES.get(choice, 1e-2), **short, **changes}).resolved({})


def run_of(choice: str, processes: int, **changes: Any) -> Any:
    spec = optimizer(choice)
    layout = (
        Parallel(dp_replicate=processes, dp_shard=1)
        if refused_layout(str(spec.name), Parallel(), processes)
        else Parallel()
    )
    settings = {
        "optimizer": spec,
        "schedule": Schedule(),
        "parallel": layout,
        "end_step": STEPS,
    }
    return segment(**{**settings, "checkpoint": {"interval": HALF}, **changes})


def run_here(folder: Path, spec: Any, *, processes: int, source: CheckpointSource | None = None) -> Result:
    """One run in this process, which is one of several."""
    result = Result()
    lifecycle = Lifecycle(
        begin_step=source.step if source else 0,
        source=source,
        storage=FolderStorage(folder, result),
        stop_requested=lambda: False,
        scratch=str(folder),
    )
    trainer = trainer_config(
        spec, Data(SyntheticSamples()), Recorder(result), lifecycle, world_size=processes
    ).build()
    trainer.train()
    result.weights, result.optimizer = (
        full(trainer.model_parts[0].state_dict()),
        full(trainer.optimizers.state_dict()),
    )
    trainer.close()
    return result


class Runs(NamedTuple):
    folder: Path
    of: dict[str, Result]  # by choice


def all_choices(folder: Path, processes: int, *, resumed: bool = False) -> Runs:
    """Every choice, one after the other in the same processes. `resumed`: from the checkpoints in the middle
    of runs that this function has made."""

    def work(rank: int) -> dict[str, Result]:
        runs = {}
        for choice in CHOICES:
            middle = CheckpointSource(
                LocalCheckpoint(folder / choice / "whole" / f"step-{HALF}"), HALF, optimizer=True
            )
            runs[choice] = run_here(
                folder / choice / ("rest" if resumed else "whole"),
                run_of(choice, processes),
                processes=processes,
                source=middle if resumed else None,
            )
        return runs

    return Runs(folder, in_kept_processes(folder, work, processes)[0])


@pytest.fixture(scope="module")
def one_process(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return all_choices(tmp_path_factory.mktemp("one"), 1)


@pytest.fixture(scope="module")
def two_processes(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return all_choices(tmp_path_factory.mktemp("two"), 2)


def losses(result: Result) -> list[float]:
    return [row["loss"] for row in result.rows]


@pytest.mark.parametrize("choice", CHOICES)
def test_it_trains(choice: str, one_process: Runs) -> None:
    measured = losses(one_process.of[choice])
    assert len(measured) == STEPS
    assert min(measured[-3:]) < measured[0] - 0.04


@pytest.fixture(scope="module", params=[1, 2])
def resumed(request: pytest.FixtureRequest) -> tuple[int, Runs, Runs]:
    """A number of processes, whole runs, and their second halves."""
    whole: Runs = request.getfixturevalue("one_process" if request.param == 1 else "two_processes")
    return request.param, whole, all_choices(whole.folder, request.param, resumed=True)


@pytest.mark.slow
@pytest.mark.parametrize("choice", CHOICES)
def test_resuming_from_a_checkpoint_gives_the_same_bits(
    choice: str, resumed: tuple[int, Runs, Runs], numerics: Numerics
) -> None:
    processes, whole, rest = resumed[0], resumed[1].of[choice], resumed[2].of[choice]
    found, expected = ([losses(run)[-HALF:], run.weights, run.optimizer] for run in (rest, whole))
    assert len(losses(rest)) == STEPS - HALF
    numerics(
        "optimizers",
        f"every optimizer, losses, weights and state {STEPS - HALF} steps after a checkpoint, {processes}"
        f" process{'es' * (processes > 1)}",
        source="this engine",
        against="a run that did not stop",
        difference=largest_difference(found, expected),
        allowed=0.0,
    )


# Largest difference of a weight between one and two processes after six steps, where it is not that of a few
# roundings: Muon's iteration runs in bfloat16, SOAP's eigenvectors of directions without gradient are those
# of rounding errors, and a moment is rounded to the other side where the last bit of a sum decides. All turn
# that bit into a part of a step.
ALIKE = {"muon": 3e-2, "d-muon": 3e-2, "soap": 2e-1, "ademamix in bfloat16": 5e-3}


@pytest.mark.parametrize("choice", CHOICES)
def test_two_processes_train_as_one_does(
    choice: str, one_process: Runs, two_processes: Runs, numerics: Numerics
) -> None:
    one, two = one_process.of[choice], two_processes.of[choice]
    assert losses(two) == pytest.approx(losses(one), abs=0.05 if choice in ALIKE else 1e-5)
    numerics(
        "optimizers",
        f"{choice if choice in ALIKE else 'all others'}, weights after {STEPS} steps on two processes",
        source="the same batches",
        against="one process",
        difference=difference(two.weights, one.weights),
        allowed=ALIKE.get(choice, 2e-4),
    )


@pytest.mark.parametrize("name", ["muon", "d-muon"])
def test_muon_on_shards_is_muon_on_whole_matrices(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, numerics: Numerics
) -> None:
    """With its iteration in float32, so that rounding does not hide a mistake."""
    monkeypatch.setattr(torch.Tensor, "bfloat16", torch.Tensor.float)
    one = train(tmp_path / "one", run_of(name, 1, end_step=4))[0]
    two = train(tmp_path / "two", run_of(name, 2, end_step=4), processes=2)[0]
    numerics(
        "optimizers",
        f"{name} with its iteration in float32, weights after 4 steps on two processes",
        source=OPTIMIZERS[name].source.split(":")[0],
        against="one process",
        difference=difference(one.weights, two.weights),
        allowed=1e-4,
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "parallel",
    [Parallel(tp=2), Parallel(tp=2, sequence_parallel=True), Parallel(cp=2), Parallel(dp_replicate=2)],
)
@pytest.mark.parametrize("choice", [choice for choice in CHOICES if choice not in ("soap", "prodigy")])
def test_four_processes_train_as_one_does(
    choice: str, parallel: Parallel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if choice in ALIKE:
        monkeypatch.setattr(torch.Tensor, "bfloat16", torch.Tensor.float)
    one = train(tmp_path / "one", run_of(choice, 1, end_step=4))[0]
    four = train(tmp_path / "four", run_of(choice, 4, end_step=4, parallel=parallel), processes=4)[0]
    # where a gradient is about eps, its rounding decides the step of 1e-2
    assert difference(one.weights, four.weights) < 5e-4


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Tiny matrices in bfloat16 are faster so, above all beside other tests."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def new(spec: OptimizerSpec) -> tuple[torch.nn.Module, Optimizers]:
    model = model_config(MODEL, sequence_length=16, attention="sdpa").build()
    model.init_weights()
    return model, Optimizers(optimizer_config(spec), model_parts=[model])


def step(model: torch.nn.Module, optimizers: Optimizers, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator)
    optimizers.step()


def settings(optimizers: Optimizers) -> list[dict[str, Any]]:
    """The hyperparameters of all groups, without parameters and what counts as state."""
    state = {"params", "step", "d", "d_max", "d_hat", "d_numerator", "d_de_nom", "weight_sum", "lr_max"}
    return [
        {k: v for k, v in group.items() if k not in state}
        for single in optimizers
        for group in single.param_groups
    ]


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("choice", CHOICES)
def test_what_a_new_stage_states_wins_over_what_the_state_remembers(choice: str) -> None:
    model, parent = new(optimizer(choice))
    step(model, parent, 0)
    stored = {name: value.clone() for name, value in parent.state_dict().items()}
    name = VARIANTS.get(choice, {"name": choice})["name"]
    published = OPTIMIZERS[name].defaults
    betas = {"betas": (0.5, 0.6, 0.7)[: len(published["betas"])]} if "betas" in published else {}
    others = {
        "momentum": 0.4,
        "gamma": 0.3,
        "precondition_frequency": 3,
        "adamw_lr_ratio": 0.2,
        "eps": 1e-3,
        "d_coef": 2.0,
        "alpha": 1.5,
    }
    others |= {"rho": 0.2, "hessian_interval": 4}
    stated = optimizer(
        choice, lr=7e-4, weight_decay=0.37, **betas, **{k: v for k, v in others.items() if k in published}
    )
    _, child = new(stated)
    fresh = settings(child)
    child.load_state_dict(stored)
    assert settings(child) == fresh
    assert all(torch.equal(value, stored[key]) for key, value in child.state_dict().items())
    assert {group["lr"] for group in fresh} == {7e-4}
    assert {group["weight_decay"] for group in fresh} == {0.0, 0.37}


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("choice", CHOICES)
def test_a_new_optimizer_has_a_state_of_tensors_as_before_the_first_step(choice: str) -> None:
    model, optimizers = new(optimizer(choice))
    before = full(model.state_dict())
    state = optimizers.state_dict()
    assert all(isinstance(value, torch.Tensor) for value in state.values())
    begins = {"step": 1.0 if choice == "prodigy" else 0.0, "d": 1e-6, "d_max": 1e-6, "lr_max": -1.0}
    for name, value in state.items():
        parameter, _, entry = name.removeprefix("state.").rpartition(".")
        expected = before[parameter] if entry == "y" else torch.full_like(value, begins.get(entry, 0.0))
        assert torch.equal(value, expected), name
    assert same(full(model.state_dict()), before)
    model_again, untouched = new(optimizer(choice))
    step(model, optimizers, 0)
    step(model_again, untouched, 0)
    assert same(full(model.state_dict()), full(model_again.state_dict()))  # having been read changes nothing


def test_matrices_are_muons_and_the_rest_is_adamws_at_its_own_rate(tmp_path: Path) -> None:
    groups: dict[str, Any] = {}

    def inspect(trainer: Any) -> None:
        for single in trainer.optimizers:
            for group in single.param_groups:
                for name, parameter in zip(group["param_names"], group["params"], strict=True):
                    groups[name] = (
                        type(single).__name__,
                        round(group["lr"], 12),
                        group["weight_decay"],
                        parameter.ndim,
                    )
        assert groups["layers.0.attention.qkv_linear.wq.weight"] == ("Muon", 2e-2, 0.1, 2)
        assert groups["tok_embeddings.weight"] == groups["lm_head.weight"] == ("AdamW", 3e-4, 0.1, 2)
        rest = {name: found for name, found in groups.items() if not name.startswith(("tok_", "lm_"))}
        assert {found[:3] for found in rest.values() if found[3] == 1} == {("AdamW", 3e-4, 0.0)}
        assert {found[:3] for found in rest.values() if found[3] == 2} == {("Muon", 2e-2, 0.1)}

    train(
        tmp_path,
        run_of("muon", 1, end_step=1, optimizer=optimizer("muon", weight_decay=0.1)),
        inspect=inspect,
    )


def test_schedule_free_checkpoints_and_held_out_losses_are_of_the_averaged_weights(tmp_path: Path) -> None:
    source = SyntheticSamples()
    heldout = {"even": [source[index] for index in range(1000, 1005)]}
    spec = run_of("schedule-free-adamw", 1, validation={"interval": STEPS})
    parent = train(tmp_path / "parent", spec, heldout=heldout, states=True)[0]
    stored = {name: torch.empty_like(value) for name, value in parent.weights.items()}
    load_tensors(stored, LocalCheckpoint(tmp_path / "parent" / f"step-{STEPS}"))
    for name, training in parent.weights.items():
        z = parent.optimizer[f"state.{name}.z"]
        # y = (1 - b1) z + b1 x
        torch.testing.assert_close(stored[name], (training - 0.1 * z) / 0.9, rtol=0, atol=1e-5)
        assert torch.equal(parent.optimizer[f"state.{name}.y"], training)
    again = train(
        tmp_path / "again",
        run_of("adamw", 1),
        source=CheckpointSource(LocalCheckpoint(tmp_path / "parent" / f"step-{STEPS}"), STEPS, False),
        stop_at=0,
    )[0]
    assert same(again.weights, stored)  # who starts from the weights has the averaged ones
    model = model_config(MODEL, sequence_length=16, attention="sdpa").build()
    model.load_state_dict(stored, strict=False)
    total, count = 0.0, 0
    for sample in heldout["even"]:
        with torch.no_grad():
            logits = model(torch.tensor(sample.input)[None], torch.tensor(sample.positions)[None]).double()
        labels = torch.tensor(sample.labels)
        total += torch.nn.functional.cross_entropy(logits[0], labels, reduction="sum").item()
        count += int((labels != -100).sum())
    assert parent.heldout[STEPS]["even"].nats == pytest.approx(total / count, abs=1e-5)


@pytest.mark.parametrize("name", ["soap", "prodigy"])
def test_the_engine_refuses_what_needs_whole_weights_on_shards(name: str, tmp_path: Path) -> None:
    unused: Any = None  # refused before anything is used
    with pytest.raises(StageError, match=rf"{name} .* this layout makes 2 shards of every weight"):
        trainer_config(segment(optimizer=optimizer(name)), unused, unused, unused, world_size=2)
