"""Advice: each code once where it is given and once where it is not; silences."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flows.planning.advice.training import ROPE_BOUNDS, rope_bound
from flows.planning.plan import Plan, make
from infra.store import Store
from specs.advice import CODES
from specs.errors import SpecError
from specs.model import FLAVOURS
from specs.recipe import load
from tests.recipes import CHAT, RECIPE, write_recipe

ROOT = Path(__file__).resolve().parents[3]
# A step of the last segment takes 54 s, its copy to the host 1.7 s; 351 s between checkpoints waste least.
FAILING = (
    "cluster={gpu: H100, gpus_per_node: 4, mfu: 1e-9, storage_bandwidth: 4.4e-4, host_bandwidth: 4.4e-4, mean_time_between_failures: 10h}",
    "stages.pretrain.budget=40 steps",
)
REPEATED = ("stages.pretrain.budget=4000 steps", "stages.main.max_repetition=1e6", "stages.second.max_repetition=1e6")
LONGER = (
    "stages.longer.steps=[{{sequence_length: 64, rope_theta: {theta}, global_batch_size: 4, budget: 4 steps, mixture: main, "
    "schedule: {{warmup: 2 steps}}}}]"
)
WHOLE = tuple(f"stages.pretrain.model.{name}={value}" for name, value in FLAVOURS["8b"].items())
Advised = Callable[..., dict[str, list[dict[str, Any]]]]


def plan_of(folder: Path, store: Store, *overrides: str, recipe: str = RECIPE) -> Plan:
    return make(load(write_recipe(folder, recipe), overrides), store)


@pytest.fixture
def advised(tmp_path: Path, store: Store) -> Advised:
    """Advice by code, as in `plan --json`."""

    def advised(*overrides: str, recipe: str = CHAT) -> dict[str, list[dict[str, Any]]]:
        found: dict[str, list[dict[str, Any]]] = {}
        for advice in plan_of(tmp_path, store, *overrides, recipe=recipe).to_json()["advice"]:
            found.setdefault(advice["code"], []).append(advice)
        return found

    return advised


CASES: dict[str, tuple[tuple[str, ...], tuple[str, ...], str]] = {
    # code: overrides with which it is given, with which it is not, a stage that it is given for
    "sft-optimizer": (("stages.sft.optimizer={name: adamw, lr: 1e-3}",), (), "sft"),
    "decay-before-sft": (("stages.cooldown.schedule={decay: linear, final: 0.1}",), ("stages.cooldown.schedule={decay: none}",), "sft"),
    "learning-rate-jump": (("stages.cooldown.optimizer.lr=4e-2",), ("stages.cooldown.optimizer.lr=1e-2",), "cooldown"),
    "slow-warmup": (("stages.pretrain.optimizer.alpha_warmup=100",), (), "cooldown"),
    "never-reached": (("stages.pretrain.checkpoint.milestones=[16, 17]",), ("stages.pretrain.checkpoint.milestones=[16]",), "pretrain"),
    "repetition": (REPEATED, (), "pretrain"),
    "goldfish-off": ((*REPEATED, "stages.pretrain.goldfish=null"), REPEATED, "pretrain"),
    "rope-theta": ((LONGER.format(theta="5e5"),), (LONGER.format(theta="6e5"),), "longer"),
    "tokens-per-batch": (
        ("stages.cooldown.sequence_length=64",),
        ("stages.cooldown.sequence_length=64", "stages.cooldown.global_batch_size=4"),
        "cooldown",
    ),
    "checkpoint-interval": (
        (*FAILING, "stages.pretrain.checkpoint.interval=1"), (*FAILING, "stages.pretrain.checkpoint.interval=6"), "pretrain",
    ),
    "gpu-memory": (("cluster={gpu: H100}", *WHOLE), ("cluster={gpu: H100}",), "pretrain"),
    "cluster-size": (
        ("cluster={gpu: H100, gpus_per_node: 4, nodes: 1}", "stages.pretrain.launch={processes: 8, parallel: {dp_replicate: 2, tp: 1}}",
         "stages.pretrain.global_batch_size=8"),
        ("cluster={gpu: H100, gpus_per_node: 4, nodes: 2}", "stages.pretrain.launch={processes: 8, parallel: {dp_replicate: 2, tp: 1}}",
         "stages.pretrain.global_batch_size=8"),
        "pretrain",
    ),
}  # fmt: skip


def test_every_code_has_a_case() -> None:
    assert set(CASES) == set(CODES)


@pytest.mark.parametrize("code", CASES)
def test_advice_is_given_only_where_it_applies(advised: Advised, code: str) -> None:
    given, absent, stage = CASES[code]
    found = [advice for advice in advised(*given).get(code, []) if advice["stage"] == stage]
    assert found and all(advice["numbers"] for advice in found)
    assert found[0]["reason"] == CODES[code].reason
    assert [advice for advice in advised(*absent).get(code, []) if advice["stage"] == stage] == []


def test_interval_with_a_small_loss_gets_no_advice(advised: Advised) -> None:
    """22 steps are more than three times the best interval, and lose less than 1%."""

    def given(interval: int) -> list[dict[str, Any]]:
        return advised(*FAILING, "stages.pretrain.budget=400 steps", f"stages.pretrain.checkpoint.interval={interval}").get(
            "checkpoint-interval", []
        )

    (rare,) = given(200)
    assert rare["numbers"]["interval_seconds"] > 9 * rare["numbers"]["young_daly_seconds"] and rare["numbers"]["lost"] > 0.1
    assert 3 * rare["numbers"]["young_daly_seconds"] < 22 * 54.0448
    assert given(22) == given(rare["numbers"]["interval_steps"]) == []


def test_interval_of_every_segment_is_checked(advised: Advised) -> None:
    """The first segment is long and saves once, the last is short."""
    first_long = ("stages.pretrain.mixture={0 steps: main, 390 steps: second}", "stages.pretrain.budget=400 steps")
    rare = ("stages.pretrain.global_batch_size=8", "stages.pretrain.checkpoint.interval=1000")
    (found,) = advised(FAILING[0], *first_long, *rare)["checkpoint-interval"]
    assert found["message"].startswith("'pretrain/1' saves every")


def test_warm_up_advice_counts_the_steps_for_which_states_are_kept(advised: Advised) -> None:
    """AdEMAMix goes on through a stage that carries its states: 16 + 6 steps."""
    carried = advised("stages.cooldown.carry=[weights, optimizer]", "stages.cooldown.optimizer={alpha_warmup: 100}")
    (advice,) = [advice for advice in carried["slow-warmup"] if advice["stage"] == "cooldown"]
    assert advice["numbers"] == {"steps": 22, "alpha_warmup": 100, "beta3_warmup": 10, "alpha_reached": pytest.approx(8 * 0.22)}


def test_the_setting_that_is_advised_fits_and_is_one_that_runs(tmp_path: Path, store: Store) -> None:
    recipe = RECIPE.replace(
        "{{dim: 32, n_layers: 2, n_heads: 2, n_kv_heads: 1, head_dim: 16, ffn_dim: 64, vocab_size: 512}}", "{{flavour: 3b}}"
    )
    stated = ("cluster={gpu: H100, nodes: 2}", "stages.pretrain.launch={processes: 8, parallel: {dp_replicate: 4}}")
    stated = (*stated, "stages.pretrain.global_batch_size={0 steps: 256}", "stages.pretrain.sequence_length=1024", *REPEATED[1:])
    (advice,) = [
        one for one in plan_of(tmp_path, store, *stated, recipe=recipe).advice.given if one.stage == "pretrain" and one.code == "gpu-memory"
    ]
    settings = [f"stages.pretrain.{field}={value}" for field, value in advice.numbers["nearest"].items() if "dp_shard" not in field]
    assert settings
    if "launch.parallel.dp_shard" in advice.numbers["nearest"]:
        settings.append("stages.pretrain.launch.parallel.dp_replicate=1")
    mended = plan_of(tmp_path, store, *stated, *settings, recipe=recipe)
    assert "gpu-memory" not in {one.code for one in mended.advice.given if one.stage == "pretrain"}
    assert mended.estimates.stages["pretrain"].to_json()["fits"]
    limit = advice.numbers["memory_limit_bytes"]
    assert advice.numbers["memory_bytes"] > limit == 80e9
    assert f"{mended.estimates.stages['pretrain'].largest.memory.total / 1e9:.1f} GB" in advice.message


@pytest.mark.parametrize(
    ("overrides", "part", "need", "nearest"),
    [  # 70,599,864,480 parameters: 141 GB in bfloat16, 282 GB in float32; a GH200 has 96
        (["preferences.launch.parallel={tp: 1}"], "completions", 141_199_728_960, {"launch.parallel.tp": 2}),
        (["preferences.completions.engine=transformers"], "completions", 282_399_457_920, {"engine": "vllm", "launch.parallel.tp": 2}),
        (["evaluate-base.launch.parallel={tp: 2}"], "harness", 141_199_728_960, {"launch.parallel.tp": 4}),
    ],
)
def test_a_whole_model_that_one_process_cannot_hold_is_advised_on(
    store: Store, overrides: list[str], part: str, need: int, nearest: dict[str, Any]
) -> None:
    plan = make(load(ROOT / "specs/recipes/apertus-70b.yaml", [f"stages.{one}" for one in overrides]), store, ask_network=False)
    (advice,) = plan.advice.given  # and none without the override: test_published_recipes
    assert (advice.code, advice.numbers) == (
        "gpu-memory", {"memory_bytes": need, "memory_limit_bytes": 96 * 10**9, "nearest": nearest},
    )  # fmt: skip
    assert f"{advice.stage}/{part} needs {need / 1e9:.1f} GB" in advice.message


def test_a_model_is_shared_among_the_gpus_of_one_node_at_most(store: Store) -> None:
    overrides = ["stages.evaluate-base.launch.parallel={tp: 8}", "stages.preferences.completions.engine=vllm"]
    plan = make(load(ROOT / "specs/recipes/apertus-70b.yaml", overrides), store, ask_network=False)
    (advice,) = plan.advice.given
    assert (advice.code, advice.stage, advice.numbers) == ("cluster-size", "evaluate-base", {"processes": 8, "gpus": 4})
    assert "evaluate-base/harness is one process that shares the model among 8 GPUs of its node, and a node has 4" in advice.message


def test_a_silenced_code_is_not_given_and_one_that_has_no_effect_is_noted(tmp_path: Path, store: Store) -> None:
    jump = "stages.cooldown.optimizer.lr=4e-2"
    silent = plan_of(tmp_path, store, jump, "stages.cooldown.silence=[learning-rate-jump, rope-theta]")
    assert "learning-rate-jump" not in {advice.code for advice in silent.advice.given}
    assert [advice.stage for advice in silent.advice.silenced] == ["cooldown"]
    assert "cooldown: silence: [rope-theta] has no effect, there is nothing to silence" in silent.to_json()["notes"]
    everywhere = plan_of(tmp_path, store, jump, "silence=[learning-rate-jump, repetition]")
    assert [advice["code"] for advice in everywhere.to_json()["silenced"]] == ["learning-rate-jump"]
    assert "silence: [repetition] has no effect, there is nothing to silence" in everywhere.to_json()["notes"]


def test_silence_changes_no_fingerprint(tmp_path: Path, store: Store) -> None:
    plans = [plan_of(tmp_path, store, *overrides) for overrides in ((), ("stages.pretrain.silence=[repetition]", "cluster={gpu: A100}"))]
    before, after = ([node.fingerprint for node in plan.graph.nodes.values()] for plan in plans)
    assert before == after


def test_an_unknown_code_is_an_error_with_the_nearest_name(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=re.escape("there is no code of advice 'learning-rate-jumps'; did you mean 'learning-rate-jump'?")):
        load(write_recipe(tmp_path), ["stages.pretrain.silence=[learning-rate-jumps]"])


@pytest.mark.parametrize(("length", "bound"), ROPE_BOUNDS[:4])
def test_below_the_bound_of_rope_some_distance_has_no_preference_for_similar_tokens(length: int, bound: float) -> None:
    """B(m) = sum_i cos(m base^(-2 i / 128)) of arXiv 2405.14591: positive everywhere near the bound, negative somewhere below."""

    def preferred(base: float) -> bool:
        frequencies = base ** (-np.arange(0, 128, 2, dtype=np.float64) / 128)
        return bool((np.cos(np.outer(np.arange(length), frequencies)).sum(1) >= 0).all())

    assert rope_bound(length) == pytest.approx(bound)
    assert any(preferred(bound * factor) for factor in np.linspace(0.82, 1.18, 37))
    assert not any(preferred(bound * factor) for factor in (0.4, 0.5, 0.6, 0.7))
