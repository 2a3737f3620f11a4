"""Figures that a recipe declares: the variants that they draw, and what cannot be drawn."""

from __future__ import annotations

import re
from typing import Any

import pytest
from pydantic import ValidationError

from specs.figures import FigureSpec, misnamed

STAGES = ["sft-lr-1e-3", "sft-lr-2e-3", "sft-plain", "evaluate-plain"]


def figure(**fields: Any) -> FigureSpec:
    axes = {"y": {"stage": "sft-{variant}", "metric": "val_loss"}, "series": {"all": "*"}}
    return FigureSpec.model_validate({"title": "Losses", **axes, **fields})


def test_a_variant_with_a_star_is_every_stage_that_matches_labelled_by_the_text_of_the_first_star() -> None:
    series = {"rates": {"lr-*": ""}, "stated": {"lr-1*": "first", "plain": "no rate"}, "all": "*"}
    assert figure(series=series).variants(STAGES) == {
        "rates": {"lr-1e-3": "1e-3", "lr-2e-3": "2e-3"},
        "stated": {"lr-1e-3": "first", "plain": "no rate"},
        "all": {"lr-1e-3": "lr-1e-3", "lr-2e-3": "lr-2e-3", "plain": "plain"},
    }
    stages = ["sft-adamw-28-1e-3", "sft-adamw-29-1e-3", "sft-adamwx-28"]
    assert figure(series={"a": "adamw-*-*"}).variants(stages) == {
        "a": {"adamw-28-1e-3": "28", "adamw-29-1e-3": "29"}
    }


def test_stages_and_variants_that_are_not_there_are_problems_of_their_fields() -> None:
    figures = {
        "a": figure(series={"none": "dpo-*"}),
        "b": figure(x={"stage": "evaluated-{variant}", "metric": "perplexity"}, series={"one": "plain"}),
    }
    found = {problem.path: (problem.message, problem.fix) for problem in misnamed(figures, STAGES)}
    assert found == {
        ("figures", "a", "series", "none"): (
            "no stage matches 'dpo-*' in sft-{variant}",
            "name variants of that stage.",
        ),
        ("figures", "b", "x", "stage"): (
            "there is no stage 'evaluated-plain'",
            "did you mean 'evaluate-plain'?",
        ),
    }


X = {"stage": "evaluate-{variant}", "metric": "perplexity"}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"y": {}}, "y needs a stage and a metric"),
        ({"y": {"stage": "sft-{variant}"}}, "an axis needs both stage and metric, or neither"),
        ({"y": {"stage": "sft-{variant}", "metric": ["a", "b"]}}, "mean of several metrics needs a label"),
        ({"y": {"stage": "sft", "metric": "val_loss"}}, "'sft' names no variant; write {variant} once"),
        ({"x": {**X, "metric": "perplexity/*"}}, "only the metric of y may have a *"),
        ({"connect": True}, "connect and front are for points"),
        ({"x": X, "front": True}, "front needs `better` of both axes"),
        ({"times": "passes"}, "times is for lines"),
        ({"mean": True, "y": {"stage": "sft-{variant}", "metric": "r/*"}}, "mean is for points and bars"),
        ({"against": "one"}, "against names a series of a figure with mean: true"),
        ({"mean": True, "against": "two"}, "with mean: true; use one of all"),
    ],
)
def test_what_cannot_be_drawn_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=re.escape(message)):
        figure(**fields)


def test_axes_with_a_metric_decide_the_form() -> None:
    assert [axis for axis, _ in figure(x=X).axes()] == ["x", "y"]
    lines = {"stage": "sft-{variant}", "metric": "memorisation/*"}
    assert [figure().form, figure(x=X).form, figure(y=lines).form] == ["bars", "points", "lines"]
