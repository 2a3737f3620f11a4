"""Selections while planning, and the figures that a recipe asks for: from stored numbers to what the page
draws."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flows.execution.flow import Run, Session
from flows.planning import plan as plans
from flows.planning.graph import Graph
from flows.planning.plan import Plan, make
from flows.report import render
from flows.report.content import collect
from flows.report.experiment_charts import draw
from flows.report.experiments import FigurePoint, Measurement, experiment_of, front, student_t
from infra.store import Store
from specs.errors import SpecError
from specs.figures import FigureSpec
from specs.profiles import Profile
from specs.recipe import load
from tests.flows.conftest import finish
from tests.flows.report.page import Page
from tests.flows.report.report_store import store as commit
from tests.recipes import RECIPE, write_recipe

SWEEP = (
    RECIPE
    + """\
  tuned:
    kind: cooldown
    matrix: {{optimizer.lr: [1e-3, 2e-3, 3e-3]}}
    from: cooldown
    carry: [weights]
    mixture: second
    budget: 4 steps
    validation: {{interval: 4, samples: 2}}
  chosen: {{kind: select, checkpoints: ["tuned-*"]}}
  after: {{kind: cooldown, from: chosen, mixture: second, budget: 3 steps, optimizer: {{lr: 1e-4}}}}
  evaluate-tuned: {{kind: evaluate, matrix: [1e-3, 2e-3, 3e-3], from: "tuned-${{matrix}}",
    sources: [corpus/notes], samples: 4}}
  measured: {{kind: select, evaluations: [evaluate-tuned], metric: perplexity, best: highest}}
  exported: {{kind: export, from: measured}}
figures:
  rates:
    title: Rates <b>
    x: {{stage: "tuned-{{variant}}", metric: val_loss, label: loss <i>}}
    y: {{stage: "evaluate-tuned-{{variant}}", metric: perplexity}}
    series: {{all: "*"}}
    text: Nothing <script>alert(1)</script>
"""
)


@pytest.fixture
def planned(tmp_path: Path, store: Store) -> Callable[..., Plan]:
    recipe = write_recipe(tmp_path, SWEEP)
    return lambda *overrides: make(load(recipe, overrides), store)


def parent(plan: Plan, name: str) -> str:
    node = plan.graph.nodes[name]
    return (node.inputs.get("parent") or node.inputs["checkpoint"]).name


# Selections


def test_a_name_with_a_star_stands_for_all_stages_that_it_fits(planned: Callable[..., Plan]) -> None:
    assert [read.name for read in planned().graph.nodes["chosen"].inputs.values()] == [
        "tuned-1e-3",
        "tuned-2e-3",
        "tuned-3e-3",
    ]


def test_stages_after_a_selection_wait_and_then_read_the_chosen_checkpoint(
    planned: Callable[..., Plan],
) -> None:
    plan = planned()
    assert "chosen" in Session(Run(plan, None, Profile()), set(plan.pipeline.stages)).needs()["after"]  # type: ignore[arg-type]  # nobody watches
    assert any("'chosen' is chosen when its candidates have finished" in note for note in plan.graph.notes)
    finish(
        plan,
        *(
            name
            for name in plan.graph.nodes
            if not name.startswith(("chosen", "after", "measured", "exported"))
        ),
    )
    commit(plan, "chosen", metrics={"chosen": 1, "value": 2.0})
    plan = planned()
    assert parent(plan, "after") == "tuned-2e-3" and plan.graph.nodes["after"].inputs["parent"].step == 4
    assert not any("'chosen'" in note for note in plan.graph.notes)
    assert plan.graph.trajectories["after"].model == plan.graph.trajectories["tuned-2e-3"].model
    assert plan.steps["after"].action == "run"


def test_a_selection_by_evaluations_means_the_checkpoint_that_was_evaluated(
    planned: Callable[..., Plan],
) -> None:
    plan = planned()
    finish(
        plan,
        *(
            name
            for name in plan.graph.nodes
            if not name.startswith(("chosen", "after", "measured", "exported"))
        ),
    )
    assert list(plan.graph.nodes["measured"].inputs) == [
        *(f"checkpoint:{i}" for i in range(3)),
        *(f"evaluation:{i}" for i in range(3)),
    ]
    commit(plan, "measured", metrics={"chosen": 2, "value": 9.0})
    assert parent(planned(), "exported") == "tuned-3e-3"


def test_a_selection_may_choose_while_a_plan_is_made(
    planned: Callable[..., Plan], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What starts from it is planned anew before it begins."""
    plan = planned()
    started = ("chosen", "after", "measured", "exported")
    finish(plan, *(name for name in plan.graph.nodes if not name.startswith(started)))
    graph_of = plans.build

    def chosen_meanwhile(*arguments: Any) -> Graph:
        graph = graph_of(*arguments)
        commit(plan, "chosen", metrics={"chosen": 1, "value": 2.0})
        return graph

    monkeypatch.setattr(plans, "build", chosen_meanwhile)
    late = planned()
    assert late.steps["chosen"].action == "reuse" and parent(late, "after") == "chosen"
    monkeypatch.setattr(plans, "build", graph_of)
    assert parent(planned(), "after") == "tuned-2e-3"


def test_selection_depends_on_its_candidates(planned: Callable[..., Plan]) -> None:
    plan = planned()
    commit(plan, "chosen", metrics={"chosen": 1, "value": 2.0})
    assert planned().steps["chosen"].action == "reuse"
    assert planned("stages.tuned-2e-3.budget=8 steps").steps["chosen"].action == "run"


WRONG = {
    'stages.chosen.checkpoints=["pretrain","cooldown"]': "'cooldown' measures none",
    'stages.chosen.metric="perplexity"': "checkpoints are compared by val_loss",
    'stages.chosen.evaluations=["evaluate"]': "either checkpoints or evaluations",
    'stages.after.from="chosen@step=2"': "names a step, and 'chosen' is one checkpoint",
    'figures.rates.y.stage="nothing-{variant}"': "no stage matches '*' in nothing-{variant}",
    'figures.rates.x.stage="pretrain-{variant}"': "there is no stage 'pretrain-1e-3'",
    'figures.rates.x.stage="pretrain"': "names no variant",
}


@pytest.mark.parametrize("override", WRONG)
def test_a_mistake_is_explained(planned: Callable[..., Plan], override: str) -> None:
    with pytest.raises(SpecError, match=WRONG[override].replace("*", r"\*")):
        planned(override)


# Figures


def figure(**changes: Any) -> FigureSpec:
    return FigureSpec(
        **{"title": "t", "y": {"stage": "e-{variant}", "metric": "m"}, "series": {"s": "*"}, **changes}
    )


def test_a_metric_with_a_star_is_a_line_over_the_numbers_times_the_passes() -> None:
    spec = figure(y={"stage": "e-{variant}", "metric": "r/*"}, times="passes")
    metrics = {
        "r/0": 0.1,
        "r/8": 0.5,
        "r/8/low": 0.4,
        "r/8/high": 0.6,
        "r/16": 0.7,
        "r/x": 1.0,
        "passes": 2.0,
    }
    points = experiment_of(spec, {"e-a": metrics, "other": {}}).points["s"]
    assert [(point.x, point.y) for point in points] == [
        (Measurement(0.0), Measurement(0.1)),
        (Measurement(16.0), Measurement(0.5, 0.4, 0.6)),
        (Measurement(32.0), Measurement(0.7)),
    ]


def test_a_few_numbers_are_evenly_spaced_and_many_stand_on_a_linear_axis() -> None:
    spec = figure(y={"stage": "e-{variant}", "metric": "r/*"})
    for count, places in ((4, [0, 1, 2, 3]), (20, [2**step for step in range(20)])):
        metrics = {f"r/{2**step}": float(step) for step in range(count)}
        drawn = draw("f", experiment_of(spec, {"e-a": metrics})).plot
        assert list(drawn["data"][-1]["x"]) == places
        assert drawn["layout"]["xaxis"].get("ticktext") == (["1", "2", "4", "8"] if count == 4 else None)


def test_numbers_that_a_logarithmic_axis_has_no_place_for_are_counted() -> None:
    y = {"stage": "e-{variant}", "metric": "r/*"}
    metrics = {f"r/{step}": float(step) for step in range(20)}
    for scales in (("linear", "log"), ("log", "linear")):
        spec = figure(x={"scale": scales[0]}, y=y | {"scale": scales[1]})
        drawn = draw("f", experiment_of(spec, {"e-a": metrics}))
        assert "Not drawn: 1 point at 0 or below, on a logarithmic axis." in drawn.summary
    few = draw("f", experiment_of(figure(x={"scale": "log"}, y=y), {"e-a": {"r/0": 0.0}}))
    assert "Not drawn" not in few.summary  # a few places are evenly spaced


def test_several_metrics_are_drawn_as_their_mean_where_all_are_there() -> None:
    spec = figure(y={"stage": "e-{variant}", "metric": ["m", "n"], "label": "mean"}, series={"s": "*"})
    found = experiment_of(spec, {"e-a": {"m": 1.0, "n": 4.0, "m/low": 0.0}, "e-b": {"m": 1.0}})
    assert [point.y for point in found.points["s"]] == [Measurement(2.5)] and found.missing == ["b"]


def test_a_variant_without_its_number_is_left_out_and_named() -> None:
    spec = figure(x={"stage": "p-{variant}", "metric": "loss"}, series={"s": {"a-*": "", "b": "said"}})
    results = {
        "e-a-1": {"m": 1.0},
        "p-a-1": {"loss": 3.0},
        "e-a-2": {"m": 2.0},
        "p-a-2": {},
        "e-b": {"m": 4.0},
        "p-b": {"loss": 5.0},
    }
    found = experiment_of(spec, results)
    assert [(point.variant, point.text) for point in found.points["s"]] == [("a-1", "1"), ("b", "said")]
    assert found.missing == ["a-2"]


SEEDS = {
    "e-a-1": {"m": 1.0},
    "e-a-2": {"m": 2.0},
    "e-a-3": {"m": 6.0},
    "e-b-1": {"m": 5.0},
    "e-b-3": {"m": 9.0},
}


def test_the_mean_over_seeds_has_the_interval_of_student() -> None:
    """1, 2 and 6: mean 3, standard deviation sqrt(7), and 4.303 for two degrees of freedom."""
    found = experiment_of(figure(mean=True, series={"A": "a-*", "B": "b-1"}), SEEDS).points
    (a,), (b,) = found["A"], found["B"]
    half = 4.303 * math.sqrt(7) / math.sqrt(3)
    assert (a.y.value, a.y.low, a.y.high) == pytest.approx((3, 3 - half, 3 + half))
    assert b.y == Measurement(5.0)  # a single run has no interval


def test_differences_are_taken_between_runs_of_one_seed() -> None:
    """Seeds 1 and 3 of B minus those of A: 4 and 3; seed 2 has no pair."""
    spec = figure(mean=True, against="A", series={"A": "a-*", "B": "b-*"})
    found = experiment_of(spec, SEEDS).points
    assert list(found) == ["B"]
    ((b,),) = found.values()
    half = 12.706 * math.sqrt(0.5) / math.sqrt(2)
    assert (b.y.value, b.y.low, b.y.high) == pytest.approx((3.5, 3.5 - half, 3.5 + half))
    assert draw("f", experiment_of(spec, SEEDS)) is not None


def test_joined_points_have_a_mean_over_seeds_at_each_number_on_x() -> None:
    """At 8, A is 4 and 6 (mean 5, standard deviation sqrt(2)), B 2 and 3; at 16, A is 3 and 3, B 1 for one
    seed. B minus A: -2 and -3 at 8, -2 at 16, where no pair of the other seed is left."""
    at = {
        "a-1-long": (16, 3), "a-1-short": (8, 4), "a-2-long": (16, 3), "a-2-short": (8, 6),
        "b-1-long": (16, 1), "b-1-short": (8, 2), "b-2-short": (8, 3),
    }  # fmt: skip
    metrics = {f"e-{name}": {"m": float(y), "tokens": float(x)} for name, (x, y) in at.items()}
    fields: dict[str, Any] = {
        "x": {"stage": "e-{variant}", "metric": "tokens"},
        "series": {"A": "a-*-*", "B": "b-*-*"},
        "mean": True,
        "connect": True,
    }
    means = experiment_of(figure(**fields), metrics).points
    (short, long), half = means["A"], 12.706
    assert (short.x, long.x, long.y.value) == (Measurement(8), Measurement(16), 3)
    assert short.y == pytest.approx((5, 5 - half, 5 + half))
    assert means["B"][1].y == Measurement(1)  # a single run has no interval
    differences = experiment_of(figure(**fields, against="A"), metrics).points
    assert list(differences) == ["B"]
    short, long = differences["B"]
    assert short.x == Measurement(8) and short.y == pytest.approx((-2.5, -2.5 - half / 2, -2.5 + half / 2))
    assert (long.x, long.y) == (Measurement(16), Measurement(-2))


@pytest.mark.parametrize(
    ("freedom", "quantile"), [(1, 12.706), (10, 2.228), (11, 2.201), (30, 2.042), (10**6, 1.960)]
)
def test_quantiles_are_those_of_printed_tables(freedom: int, quantile: float) -> None:
    assert student_t(freedom) == pytest.approx(quantile, abs=1e-3)


def test_front_has_the_undominated_points() -> None:
    at = {"a": (1, 5), "b": (2, 3), "c": (3, 4), "d": (4, 1), "e": (4, 2)}
    points = [FigurePoint(name, "", Measurement(x), Measurement(y)) for name, (x, y) in at.items()]
    assert [point.variant for point in front(points, "lower", "lower")] == ["a", "b", "d"]
    assert [point.variant for point in front(points, "higher", "lower")] == ["d"]


def test_page_draws_stored_numbers_and_escapes_recipe_text(planned: Callable[..., Plan]) -> None:
    assert Page(render(planned())).text.count("not run yet 1e-3, 2e-3, 3e-3") == 1
    plan = planned()
    validation = {"validation": {"corpus/notes": 3.0, "corpus/other": 5.0}, "validation_step": 4}
    for name in ("tuned-1e-3", "tuned-2e-3", "tuned-3e-3"):
        commit(plan, name, facts={"tokens": 1, "passes": {}} | (validation if name != "tuned-3e-3" else {}))
    for value, name in enumerate(("1e-3", "2e-3", "3e-3")):
        commit(plan, f"evaluate-tuned-{name}", metrics={"perplexity": 10.0 + value})
    points = collect(plan).experiments["rates"].points["all"]
    assert [(point.variant, point.x, point.y) for point in points] == [
        ("1e-3", Measurement(4.0), Measurement(10.0)),
        ("2e-3", Measurement(4.0), Measurement(11.0)),
    ]
    page = Page(render(plan))
    assert "Nothing <script>alert(1)</script>" in page.text and "Rates <b>" in page.text
    assert len(page.scripts) == 3
    (drawn,) = (
        found
        for found in page.figures.values()
        if found["layout"]["xaxis"].get("title", {}).get("text") == "loss &lt;i&gt;"
    )
    assert (drawn["data"][0]["x"], drawn["data"][0]["y"], drawn["data"][0]["text"]) == (
        [4.0, 4.0],
        [10.0, 11.0],
        ["1e-3", "2e-3"],
    )
