"""Advice on checkpoint intervals and memory: the setting that is advised is one that helps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from flows.planning.plan import make
from infra.store import Store
from specs.recipe import load
from tests.flows.planning.advising import FAILING, REPEATED, Advised, plan_of
from tests.recipes import RECIPE

ROOT = Path(__file__).resolve().parents[4]


def test_interval_with_a_small_loss_gets_no_advice(advised: Advised) -> None:
    """22 steps are more than three times the best interval, and lose less than 1%."""

    def given(interval: int) -> list[dict[str, Any]]:
        return advised(
            *FAILING, "stages.pretrain.budget=400 steps", f"stages.pretrain.checkpoint.interval={interval}"
        ).get("checkpoint-interval", [])

    (rare,) = given(200)
    assert (
        rare["numbers"]["interval_seconds"] > 9 * rare["numbers"]["young_daly_seconds"]
        and rare["numbers"]["lost"] > 0.1
    )
    assert 3 * rare["numbers"]["young_daly_seconds"] < 22 * 54.0448
    assert given(22) == given(rare["numbers"]["interval_steps"]) == []


def test_interval_of_every_segment_is_checked(advised: Advised) -> None:
    """The first segment is long and saves once, the last is short."""
    first_long = (
        "stages.pretrain.mixture={0 steps: main, 390 steps: second}",
        "stages.pretrain.budget=400 steps",
    )
    rare = ("stages.pretrain.global_batch_size=8", "stages.pretrain.checkpoint.interval=1000")
    (found,) = advised(FAILING[0], *first_long, *rare)["checkpoint-interval"]
    assert found["message"].startswith("'pretrain/1' saves every")


def test_the_setting_that_is_advised_fits_and_is_one_that_runs(tmp_path: Path, store: Store) -> None:
    recipe = RECIPE.replace(
        "{{dim: 32, n_layers: 2, n_heads: 2, n_kv_heads: 1, head_dim: 16, ffn_dim: 64, vocab_size: 512}}",
        "{{flavour: 3b}}",
    )
    stated = (
        "cluster={gpu: H100, nodes: 2}",
        "stages.pretrain.launch={processes: 8, parallel: {dp_replicate: 4}}",
    )
    stated = (
        *stated,
        "stages.pretrain.global_batch_size={0 steps: 256}",
        "stages.pretrain.sequence_length=1024",
        *REPEATED[1:],
    )
    (advice,) = [
        one
        for one in plan_of(tmp_path, store, *stated, recipe=recipe).advice.given
        if one.stage == "pretrain" and one.code == "gpu-memory"
    ]
    settings = [
        f"stages.pretrain.{field}={value}"
        for field, value in advice.numbers["nearest"].items()
        if "dp_shard" not in field
    ]
    assert settings
    if "launch.parallel.dp_shard" in advice.numbers["nearest"]:
        settings.append("stages.pretrain.launch.parallel.dp_replicate=1")
    mended = plan_of(tmp_path, store, *stated, *settings, recipe=recipe)
    assert "gpu-memory" not in {one.code for one in mended.advice.given if one.stage == "pretrain"}
    assert mended.estimates.stages["pretrain"].to_json()["fits"]
    limit = advice.numbers["memory_limit_bytes"]
    assert advice.numbers["memory_bytes"] > limit == 80e9
    assert f"{mended.estimates.stages['pretrain'].largest.memory.total / 1e9:.1f} GB" in advice.message


OF_70B = (
    "llama-3.3-70b",
    "qwen2.5-72b",
    "llama-3.3-70b-principle",
    "qwen2.5-72b-principle",
    "qwen2.5-72b-charter",
)


@pytest.mark.parametrize(
    ("overrides", "parts", "need", "nearest"),
    [  # 70,599,864,480 parameters: 141 GB in bfloat16, 282 GB in float32; a GH200 has 96
        (
            ["preferences-standard.launch.parallel={tp: 1}"],
            ["completions", *(f"{name}/completions" for name in OF_70B)],
            141_199_728_960,
            {"launch.parallel.tp": 2},
        ),
        (
            ["preferences-standard.completions.engine=transformers"],
            ["completions"],
            282_399_457_920,
            {"engine": "vllm", "launch.parallel.tp": 2},
        ),
        (
            ["evaluate-long.launch.parallel={tp: 1}"],
            ["harness/ruler"],
            141_199_728_960,
            {"launch.parallel.tp": 2},
        ),
        (  # the folder is in float32
            ["evaluate-long.launch.parallel={tp: 2}", "evaluate-long.harness.engine=transformers"],
            ["harness/ruler"],
            141_199_728_960,
            {"launch.parallel.tp": 4},
        ),
    ],
)
def test_a_whole_model_that_one_process_cannot_hold_is_advised_on(
    store: Store, overrides: list[str], parts: list[str], need: int, nearest: dict[str, Any]
) -> None:
    plan = make(
        load(ROOT / "specs/recipes/apertus-70b.yaml", [f"stages.{one}" for one in overrides]),
        store,
        ask_network=False,
    )
    given = plan.advice.given  # and none without the override: test_published_recipes
    for advice, part in zip(given, parts, strict=True):
        numbers = dict(advice.numbers)
        found = numbers.pop("memory_bytes")
        assert (advice.code, numbers) == (
            "gpu-memory", {"memory_limit_bytes": 96 * 10**9, "nearest": nearest},
        )  # fmt: skip
        assert found == (need if part == parts[0] else pytest.approx(need, rel=0.03))  # others of 70B and 72B
        assert f"{advice.stage}/{part} needs {found / 1e9:.1f} GB" in advice.message


def test_a_model_is_shared_among_the_gpus_of_one_node_at_most(store: Store) -> None:
    overrides = [
        "stages.evaluate-long.launch.parallel={tp: 8}",
        "stages.preferences-standard.completions.engine=vllm",
    ]
    plan = make(load(ROOT / "specs/recipes/apertus-70b.yaml", overrides), store, ask_network=False)
    (advice,) = plan.advice.given
    assert (advice.code, advice.stage, advice.numbers) == (
        "cluster-size",
        "evaluate-long",
        {"processes": 8, "gpus": 4},
    )
    assert (
        "evaluate-long/harness/ruler is one process that shares the model among 8 GPUs of its node, and a"
        " node has 4" in advice.message
    )


def test_a_reward_model_that_one_gpu_cannot_hold_is_advised_on(tmp_path: Path, store: Store) -> None:
    """Trained by a stage of the recipe, and exported in float32."""
    recipe = tmp_path / "judged.yaml"
    recipe.write_text(f"""\
extends: {ROOT}/specs/recipes/apertus-70b.yaml
stages:
  judge: {{kind: reward_model, from: sft, pairs: [chat/preference-standard], budget: 100 steps,
    global_batch_size: 512, optimizer: {{lr: 1e-5}}, launch: {{processes: 512, parallel: {{dp_shard: 512}}}}}}
  preferences-standard: {{reward: {{model: null, parameters: null, from: judge}}}}
""")
    plan = make(load(recipe), store, ask_network=False)
    (advice,) = (one for one in plan.advice.given if "/rewards needs" in one.message)
    assert (advice.code, advice.stage, advice.numbers["nearest"]) == (
        "gpu-memory",
        "preferences-standard",
        None,
    )
    assert advice.numbers["memory_bytes"] == pytest.approx(282_399_457_920, rel=0.03)
    assert advice.message.endswith("cannot be divided among GPUs; use a smaller reward model")
