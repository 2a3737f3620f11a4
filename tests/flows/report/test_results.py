"""Results that are damaged or unexpected."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from flows.planning.plan import Plan
from flows.report import render
from flows.report.content import collect
from flows.report.results import read_rewards, read_samples
from tests.flows.report.report_store import add, store, trained

Planned = Callable[..., Plan]


def test_damaged_or_unexpected_files_become_notes(planned: Planned) -> None:
    assert (
        read_samples(None) == []
        and read_samples({"prompts": [3, {"completions": "no"}]})[0].completions == []
    )
    assert (
        read_rewards([]) is None
        and read_rewards({"rows": [{"reward": "high"}, {"reward": float("nan")}]}) is None
    )
    plan = trained(planned())
    add(plan, "compare", "evaluate", {"checkpoint": ("cooldown", 6)})
    store(
        plan,
        "compare",
        metrics={"kl/against": 1.0},
        files={"samples.json": {"prompts": []}, "rewards.json": {}},
    )
    node = plan.graph.nodes["compare"]
    Path(plan.store.full(f"{node.path}/attempts/attempt-compare/samples.json")).write_text("{")
    run = collect(plan)
    assert run.prompts == [] and any(
        "samples.json of compare could not be read" in note for note in run.notes
    )
    assert "kl/against" in render(plan)
