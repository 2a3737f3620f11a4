"""Optimizers of a recipe: published defaults, what each reads, what is inherited, and layouts that are
refused."""

from pathlib import Path

import pytest

from specs.capabilities import OPTIMIZERS
from specs.errors import SpecError
from specs.launch import Parallel
from specs.optimizer import OptimizerSpec, refused_layout
from specs.recipe import load
from tests.recipes import CHAT, write_recipe

DEFAULTS = {  # of the papers and their authors' code, typed in from there
    "ademamix": {
        "betas": (0.9, 0.999, 0.9999), "alpha": 8, "alpha_warmup": 100_000, "beta3_warmup": 100_000,
        "eps": 1e-8,
        "weight_decay": 0.1, "grad_clip": 0.1,
    },
    "adamw": {"betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01},
    "adopt": {"betas": (0.9, 0.9999), "eps": 1e-6, "weight_decay": 0},
    "lion": {"betas": (0.9, 0.99), "weight_decay": 0},
    "signum": {"momentum": 0.9, "weight_decay": 0},
    "muon": {"momentum": 0.95, "weight_decay": 0, "betas": (0.9, 0.95), "eps": 1e-10,
    "adamw_lr_ratio": 0.015},
    "d-muon": {"momentum": 0.95, "weight_decay": 0.1, "betas": (0.9, 0.95), "eps": 1e-8, "adamw_lr_ratio": 1},
    "soap": {"betas": (0.95, 0.95), "eps": 1e-8, "weight_decay": 0.01, "precondition_frequency": 10},
    "prodigy": {"betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0, "d_coef": 1},
    "schedule-free-adamw": {"betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0},
    "mars": {"betas": (0.95, 0.99), "gamma": 0.025, "eps": 1e-8, "weight_decay": 0},
    "sophia": {"betas": (0.965, 0.99), "rho": 0.04, "hessian_interval": 10, "eps": 1e-15,
    "weight_decay": 0.1},
}  # fmt: skip


def test_every_optimizer_sets_exactly_the_defaults_of_its_paper() -> None:
    assert list(OPTIMIZERS) == list(DEFAULTS)
    for name, values in DEFAULTS.items():
        found = OptimizerSpec(name=name, lr=0.5).resolved({}).model_dump(exclude_none=True)
        expected = {"grad_clip": 1, **values}
        assert found == {"name": name, "lr": 0.5, "state_dtype": "float32", **expected}, name


def test_without_a_name_it_is_ademamix() -> None:
    assert OptimizerSpec(lr=1e-3).resolved({}).name == "ademamix"


def problems(spec: OptimizerSpec, inherited: dict[str, object] | None = None) -> list[str]:
    with pytest.raises(SpecError) as raised:
        spec.resolved(inherited or {}, ("stages", "sft", "optimizer"))
    return [str(problem) for problem in raised.value.problems]


def test_a_field_that_the_optimizer_does_not_read_is_an_error_with_those_it_reads() -> None:
    found = problems(OptimizerSpec(name="lion", lr=1e-4, alpha=8, momentum=0.9))
    assert found == [
        (
            "stages.sft.optimizer.momentum: lion does not read momentum; it reads lr, betas, weight_decay,"
            " grad_clip. Fix: leave it out, or use an optimizer that reads it: signum, muon, d-muon."
        ),
        (
            "stages.sft.optimizer.alpha: lion does not read alpha; it reads lr, betas, weight_decay,"
            " grad_clip. Fix: leave it out, or use an optimizer that reads it: ademamix."
        ),
    ]
    (states,) = problems(OptimizerSpec(name="adamw", lr=1e-4, state_dtype="bfloat16"))
    assert "adamw does not read state_dtype" in states


def test_a_resolved_optimizer_can_be_read_again() -> None:
    for name in OPTIMIZERS:
        resolved = OptimizerSpec(name=name, lr=1e-3).resolved({})
        assert OptimizerSpec.model_validate_json(resolved.model_dump_json()) == resolved
        assert resolved.resolved({}) == resolved


def test_the_number_of_betas_is_that_of_the_optimizer() -> None:
    assert problems(OptimizerSpec(name="adamw", lr=1e-4, betas=(0.9, 0.99, 0.999))) == [
        "stages.sft.optimizer.betas: adamw has 2 betas, not 3. Fix: write for example [0.9, 0.999]."
    ]
    assert "ademamix has 3 betas, not 2" in problems(OptimizerSpec(lr=1e-4, betas=(0.9, 0.99)))[0]


def test_missing_fields_come_from_a_parent_with_the_same_optimizer() -> None:
    parent = OptimizerSpec(name="lion", lr=1e-4, betas=(0.8, 0.9), grad_clip=0.3).resolved({})
    child = OptimizerSpec(weight_decay=0.2).resolved(parent.model_dump() | {"lr": 5e-5})
    assert (child.name, child.lr, child.betas, child.weight_decay, child.grad_clip) == (
        "lion",
        5e-5,
        (0.8, 0.9),
        0.2,
        0.3,
    )


def test_parent_with_another_optimizer_passes_on_only_grad_clip() -> None:
    parent = OptimizerSpec(
        name="ademamix", lr=1e-4, betas=(0.8, 0.9, 0.99), eps=1e-3, weight_decay=0.7, state_dtype="bfloat16"
    )
    inherited = parent.resolved({}).model_dump()
    child = OptimizerSpec(name="adamw", lr=1e-5).resolved(inherited)
    assert child == OptimizerSpec(name="adamw", lr=1e-5, grad_clip=0.1).resolved({})
    assert problems(OptimizerSpec(name="adamw"), inherited) == [
        "stages.sft.optimizer.lr: the learning rate of the parent's optimizer ademamix does not apply to"
        " adamw. Fix: set optimizer.lr."
    ]


def test_fields_that_are_not_read_enter_no_fingerprint() -> None:
    assert OptimizerSpec(name="signum", lr=1e-4).resolved({}).identity_fields() == {
        "name": "signum", "lr": 1e-4, "momentum": 0.9, "weight_decay": 0.0, "grad_clip": 1.0,
    }  # fmt: skip
    ademamix = OptimizerSpec(lr=1e-4).resolved({})
    before_there_were_others = {
        "name",
        "lr",
        "betas",
        "alpha",
        "alpha_warmup",
        "beta3_warmup",
        "eps",
        "weight_decay",
        "grad_clip",
    }
    assert set(ademamix.identity_fields()) == before_there_were_others
    assert (
        OptimizerSpec(lr=1e-4, state_dtype="bfloat16").resolved({}).identity_fields()["state_dtype"]
        == "bfloat16"
    )


@pytest.mark.parametrize("stage", ["qrpo", "dpo"])
def test_sophia_is_refused_for_losses_that_are_not_likelihoods(stage: str, tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path, CHAT)
    sophia = "{name: sophia, lr: 1e-4}"
    assert load(
        recipe,
        [
            f"stages.sft.optimizer={sophia}",
            "stages.qrpo.optimizer.name=adamw",
            "stages.dpo.optimizer.name=adamw",
        ],
    )
    with pytest.raises(
        SpecError,
        match=rf"stages\.{stage}\.optimizer\.name: sophia .* and not {stage}",
    ) as raised:
        load(recipe, [f"stages.{stage}.optimizer={sophia}"])
    assert len(raised.value.problems) == 1
    with pytest.raises(SpecError, match="and not qrpo"):
        load(recipe, [f"stages.sft.optimizer={sophia}"])  # which qrpo and dpo inherit


@pytest.mark.parametrize("policy", ["skip", "rollback"])
def test_sophia_is_refused_where_steps_may_be_skipped(policy: str, tmp_path: Path) -> None:
    overrides = [
        "stages.pretrain.optimizer={name: sophia, lr: 1e-4}",
        f"stages.pretrain.anomalies.spike={policy}",
    ]
    assert load(write_recipe(tmp_path), [*overrides[:1], "stages.pretrain.anomalies.spike=stop"])
    with pytest.raises(
        SpecError, match=r"stages\.pretrain\.optimizer\.name: sophia .* no step can be skipped"
    ):
        load(write_recipe(tmp_path), overrides)


@pytest.mark.parametrize(
    ("parallel", "processes", "shards"),
    [
        (Parallel(), 1, 1),
        (Parallel(), 2, 2),
        (Parallel(tp=2), 2, 2),
        (Parallel(cp=2), 2, 2),
        (Parallel(dp_replicate=2, dp_shard=1), 2, 1),
        (Parallel(dp_replicate=2, dp_shard=2), 4, 2),
        (Parallel(dp_replicate=2), 2, 1),
    ],
)
def test_optimizers_of_whole_weights_are_refused_for_shards(
    parallel: Parallel, processes: int, shards: int
) -> None:
    for name in OPTIMIZERS:
        reason = refused_layout(name, parallel, processes)
        if name in ("soap", "prodigy") and shards > 1:
            assert reason is not None and f"this layout makes {shards} shards of every weight" in reason
        else:
            assert reason is None


def test_a_refused_layout_is_a_problem_of_the_recipe(tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path)
    soap = ["stages.pretrain.optimizer={name: soap, lr: 1e-3}"]
    assert load(recipe, soap)
    with pytest.raises(SpecError) as raised:
        load(recipe, [*soap, "launch.processes=2"])
    assert "stages.pretrain.optimizer.name: soap needs the eigenvectors of whole matrices" in str(
        raised.value
    )
    assert "use launch.parallel {dp_replicate: 2, dp_shard: 1}" in str(raised.value)
    assert load(recipe, [*soap, "launch.processes=2", "launch.parallel={dp_replicate: 2, dp_shard: 1}"])


def test_states_are_not_carried_into_another_optimizer(tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path)
    other = "stages.cooldown.optimizer={name: adamw, lr: 1e-4}"
    with pytest.raises(
        SpecError,
        match=(
            r"carry: the states to carry are those of ademamix, which adamw cannot use. Fix: set"
            r" carry"
        ),
    ):
        load(recipe, [other])
    assert load(recipe, [other, "stages.cooldown.carry=[weights, data]"])


def test_sophia_is_refused_in_pipelines() -> None:
    assert "a pipeline cannot do that (pp 2)" in (refused_layout("sophia", Parallel(pp=2), 2) or "")
    assert refused_layout("sophia", Parallel(tp=2), 2) is None
