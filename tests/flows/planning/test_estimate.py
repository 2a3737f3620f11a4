"""What a plan says it takes: published numbers, arithmetic by hand, storage, utilisation of stored runs,
two plans side by side."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from flows.planning.plan import Plan, make
from infra.store import Store
from specs.errors import SpecError
from specs.recipe import load
from tests.flows.conftest import finish
from tests.recipes import CLUSTER, write_recipe

Planned = Callable[..., Plan]


def test_plan_sums_estimates_of_its_stages(planned: Planned) -> None:
    document = planned(CLUSTER, "launch.mfu=0.25", "stages.cooldown.launch.mfu=0.5").to_json()["estimates"]
    stages, totals = document["stages"], document["totals"]
    assert list(stages) == ["pretrain", "cooldown"]
    pretrain, cooldown = stages["pretrain"], stages["cooldown"]
    assert (pretrain["mfu"], cooldown["mfu"], pretrain["mfu_source"]) == (0.25, 0.5, "stated")
    assert (
        pretrain["tokens"] == (12 * 4 + 4 * 8) * 32
        and pretrain["sequences"] == 12 * 4 + 4 * 8
        and pretrain["steps"] == 16
    )
    hours = pretrain["flops"] / (0.25 * 989.5e12) / 3600
    assert pretrain["gpu_hours"] == pytest.approx(hours)
    assert pretrain["energy_kwh"] == pytest.approx(hours * 0.5 * 1.2) and pretrain["cost"] == pytest.approx(
        3 * hours
    )
    for name in ("tokens", "steps"):
        assert totals[name] == pretrain[name] + cooldown[name]
    for name in ("flops", "gpu_hours", "seconds", "energy_kwh", "cost"):
        asked = document["inference"]["evaluate"][name]
        assert totals[name] == pytest.approx(pretrain[name] + cooldown[name] + asked)
    series = [part["stored_bytes_after"] for stage in stages.values() for part in stage["parts"]]
    each = pretrain["checkpoint"]["bytes"]
    assert series == [2 * each, 4 * each, 6 * each, 8 * each]  # steps 5 and 8, 10 and 12, 15 and 16, 4 and 6
    assert totals["stored_bytes"] == totals["peak_storage_bytes"] == series[-1]
    assert [(part["start_step"], part["end_step"], part["start_tokens"],
    part["end_tokens"]) for part in pretrain["parts"]] == [
        (0, 8, 0, 1024), (8, 12, 1024, 1536), (12, 16, 1536, 2560),
    ]  # fmt: skip
    assert totals["masked_labels"] == 1024 // 50 + 512 // 50 + 1024 // 50 + 1536 // 50
    # Whole checkpoints by two segments and the cooldown, which carries the states; weights, a quarter of
    # them, by evaluation and export.
    assert totals["checkpoint_loads"] == 5 and totals["checkpoint_read_bytes"] == pytest.approx(
        3.5 * each, rel=1e-3
    )
    assert totals["storage_cost_per_month"] == pytest.approx(totals["stored_bytes"] / 1e12 * 20)
    assert pretrain["fits"] and pretrain["memory_limit_bytes"] == 80e9
    parts = {
        name: value for name, value in pretrain["memory_bytes"].items() if name not in ("total", "moment")
    }
    assert sum(parts.values()) == pretrain["memory_bytes"]["total"]


def test_estimates_that_depend_on_a_cluster_are_unknown_without_one(planned: Planned) -> None:
    document = planned().to_json()["estimates"]
    assert document["cluster"] is None
    assert [document["totals"][name] for name in ("gpu_hours", "seconds", "energy_kwh", "cost")] == [None] * 4
    assert document["totals"]["flops"] > 0 and document["stages"]["pretrain"]["fits"] is None


def test_utilisation_is_measured_on_what_is_stored(planned: Planned) -> None:
    """Half of what is stored is of a stage, the other stage takes its number over."""
    measuring = "cluster={gpu: H100}"
    assert planned(measuring).to_json()["estimates"]["stages"]["pretrain"]["mfu"] is None
    plan = planned(measuring)
    finish(plan, "pretrain/1", "pretrain/2", "pretrain/3", metrics={"tokens_per_second": 1e6})
    stages = planned(measuring).to_json()["estimates"]["stages"]
    node = plan.graph.nodes["pretrain/1"]
    expected = 1e6 * node.flops / node.tokens / 989.5e12
    assert (stages["pretrain"]["mfu"], stages["pretrain"]["mfu_source"]) == (
        pytest.approx(expected),
        "measured",
    )
    assert (stages["cooldown"]["mfu"], stages["cooldown"]["mfu_source"]) == (
        pytest.approx(expected),
        "measured elsewhere",
    )
    changed = planned(measuring, "stages.pretrain.optimizer.lr=2e-2").to_json()["estimates"]["stages"][
        "pretrain"
    ]
    assert changed["mfu_source"] == "measured"  # by the last run under the same names


def test_work_that_two_stages_share_is_counted_once(planned: Planned, tmp_path: Path, store: Store) -> None:
    text = write_recipe(tmp_path).read_text()
    duplicate = text + "  again: {kind: cooldown, from: pretrain, mixture: main, budget: 6 steps}\n"
    (tmp_path / "duplicate.yaml").write_text(duplicate)
    assert (
        make(load(tmp_path / "duplicate.yaml"), store).estimates.totals()["flops"]
        == planned().estimates.totals()["flops"]
    )


def test_a_utilisation_above_one_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"cluster\.mfu"):
        load(write_recipe(tmp_path), ["cluster={gpu: H100, mfu: 36}"])
