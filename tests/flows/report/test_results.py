"""Results that are damaged or unexpected."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from flows.planning.plan import Plan
from flows.report import render
from flows.report.content import collect
from flows.report.results import agreement_rows, read_rewards, read_samples
from specs.stages.evaluate_reward import MEASURES, EvaluateRewardStage
from tests.flows.report.page import Page
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


def test_agreement_of_rewards_is_a_table_with_intervals_and_gates(planned: Callable[..., Plan]) -> None:
    plan = trained(planned())
    stage = {
        "kind": "evaluate_reward",
        "reward": "grounded-answer",
        "pairs": ["chat"],
        "gates": [{"metric": "accuracy/low", "min": 0.5}],
    }
    measured = {
        "judged": {"pairs": 7.0, "accuracy": 0.75, "accuracy/low": 0.25, "accuracy/high": 1.0,
                   "outside": 0.125},
        "function": {"accuracy/source/a/<b>": 0.5, "accuracy/source/a/<b>/low": 0.375,
                     "accuracy/source/a/<b>/high": 0.625},
    }  # fmt: skip
    for name, metrics in measured.items():
        plan.pipeline.stages[name] = EvaluateRewardStage.model_validate(stage)
        add(plan, name, "evaluate_reward", {})
        store(plan, name, metrics=metrics)
    run = collect(plan)
    assert [found.name for found in run.agreements] == ["judged", "function"]
    assert agreement_rows(run.agreements) == {
        "accuracy": MEASURES["accuracy"],
        "accuracy/source/a/<b>": "accuracy on a/<b>",
    }
    text = "".join(Page(render(plan)).text.split())
    for shown in (
        "measure judged function labelled pairs 7 –",
        "equal ones counting half 0.75 0.25 to 1 –",
        "accuracy on a/<b> – 0.5 0.375 to 0.625",
        "probability of what is no answer 0.125 –",
        "judged accuracy/low ≥ 0.5 0.25 ✕ fail",
    ):
        assert shown.replace(" ", "") in text, shown
