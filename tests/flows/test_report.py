"""The report: the numbers it collects, and a page that stands alone whatever the store holds."""

from __future__ import annotations

import json
import re
from collections.abc import Callable

import pytest

from flows.planning.plan import Plan
from flows.report import render
from flows.report.content import collect
from infra.store import Attempt
from infra.store.documents import Seconds
from tests.flows.report.page import Page
from tests.flows.report.report_store import add, rows_of, store, trained

Planned = Callable[..., Plan]
HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)>&\"'"


def test_an_empty_store_makes_a_report_of_the_plan(planned: Planned) -> None:
    plan = planned()
    run, page = collect(plan), Page(render(plan))
    assert {stage.state for stage in run.stages} == {"not run"} and run.curves == [] and run.newest == ""
    assert "Nothing has been trained yet." in page.text and "Not run yet." in page.text
    assert list(page.figures) == ["chart-0"]  # the mixtures are known from the recipe


def test_known_metrics_are_drawn_and_others_are_in_a_table(planned: Planned) -> None:
    plan = trained(planned())
    metrics = {
        "loss/position/0": 4.0,
        "loss/position/64": 3.0,
        "forgetting/corpus/notes": 0.1,
        "kl/against": 0.02,
        "quite/new": 7.25,
    }
    rewards = {
        "reward/mean": 1.0,
        "reward/difference": 0.5,
        "reward/difference/low": 0.25,
        "reward/difference/high": 0.75,
    }
    rows = [{"id": str(index), "reward": index / 10, "against": index / 20} for index in range(10)]
    add(plan, "compare", "evaluate", {"checkpoint": ("cooldown", 6)})
    store(
        plan,
        "compare",
        metrics=metrics | rewards,
        files={"rewards.json": {"model": "new", "against": "old", "rows": rows}},
    )
    add(plan, "align", "dpo", {"parent": ("cooldown", 6)}, steps=3, tokens=30)
    store(plan, "align", rows=rows_of(plan, "align", accuracy=0.7, reward_chosen=1.5))
    add(plan, "pairs", "pairs", {})
    store(plan, "pairs", metrics={"pairs": 12, "quantile_histogram": [3, 4, 5]})
    page = Page(render(plan))
    titles = {element[1].get("aria-label", "") or "" for element in page.elements if element[0] == "div"}
    for expected in (
        "Loss by position",
        "Forgetting",
        "Rewards: compare",
        "Difference of rewards",
        "Quantiles: pairs",
        "align",
    ):
        assert any(title.startswith(expected) for title in titles), expected
    assert re.search(r"quite/new\s*–\s*7.25", page.text)
    own = next(
        figure
        for figure in page.figures.values()
        if any("loss (dpo)" in a["text"] for a in figure["layout"].get("annotations", []))
    )
    assert [a["text"] for a in own["layout"]["annotations"][-2:]] == [
        "<b>accuracy</b>",
        "<b>reward chosen</b>",
    ]
    assert own["data"][0]["x"] == [2560 + 1536 + 10 * step for step in (1, 2, 3)]


def test_hostile_text_stays_text(planned: Planned) -> None:
    plan = trained(planned("stages.main.description=" + json.dumps(HOSTILE)))
    stage = "evil" + HOSTILE.replace("/", "\u2215")
    add(plan, stage, "evaluate", {"checkpoint": ("cooldown", 6)})
    completions = [{"model": HOSTILE, "text": HOSTILE, "reward": 1}]
    store(
        plan,
        stage,
        metrics={f"perplexity/{HOSTILE}": 3.0, "reward/mean": 1.0, HOSTILE: 1.0},
        files={
            "samples.json": {"prompts": [{"id": HOSTILE, "prompt": HOSTILE, "completions": completions}]},
            "rewards.json": {
                "model": HOSTILE,
                "against": HOSTILE,
                "rows": [{"id": HOSTILE, "reward": 1, "against": 0}],
            },
        },
    )
    text = render(plan)
    page = Page(text)
    assert not [
        element
        for element in page.elements
        if element[0] == "img" or any(name.startswith("on") for name in element[1])
    ]
    assert [element[1].get("type") for element in page.elements if element[0] == "script"] == [
        "application/json",
        None,
        None,
    ]
    assert page.text.count(HOSTILE) >= 4
    labels = [
        str(trace.get("name")) + str(trace.get("x"))
        for figure in page.figures.values()
        for trace in figure["data"]
    ]
    assert any("&lt;img" in text for text in labels) and not any("<" in text for text in labels)
    templates = {trace.get("hovertemplate") for figure in page.figures.values() for trace in figure["data"]}
    assert not any(template and "img" in template for template in templates)


def test_page_is_self_contained(planned: Planned) -> None:
    text = render(trained(planned()))
    page = Page(text)
    assert len(text.encode()) < 8_000_000
    for _, attributes in page.elements:
        for name in ("src", "href", "srcset", "action", "data", "poster"):
            assert name not in attributes or str(attributes[name]).startswith("#")
    style = text[text.index("<style>") : text.index("</style>")]
    assert "url(" not in style and "@import" not in style
    policy = next(
        attributes["content"] or ""
        for tag, attributes in page.elements
        if attributes.get("http-equiv") == "Content-Security-Policy"
    )
    assert policy.startswith("default-src 'none'; img-src data: blob:;") and "http" not in policy
    assert "script-src 'sha256-" in policy and policy.count("'sha256-") == 2
    anchors = {attributes["id"] for _, attributes in page.elements if "id" in attributes}
    assert {f"#{anchor}" for anchor in anchors} >= {
        attributes["href"] for tag, attributes in page.elements if tag == "a"
    }


def test_the_same_store_gives_the_same_page(planned: Planned) -> None:
    trained(planned())
    assert render(planned()) == render(planned())


def test_a_duration_of_the_report_is_that_of_the_terminal(
    planned: Planned, monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds = Seconds(startup=0.0, compute=3599.6, storage=0.0)
    monkeypatch.setattr(Attempt, "seconds", lambda attempt: seconds)
    assert re.search(r"60 min, [\d.]+k?B", Page(render(trained(planned()))).text)


def test_languages_and_excluded_domains_of_a_corpus_are_in_tables(planned: Planned) -> None:
    plan = planned()
    counts = {"deu": {"kept": {"documents": 7, "characters": 9, "tokens": 1234}, "length": {"documents": 3}}}
    domains = [{"domain": HOSTILE, "agent": "(any)", "documents": 41, "characters": 43, "tokens": 47}]
    metrics = {"read": {"documents": 10}, "languages": counts, "robots": domains}
    store(plan, "corpus/notes", metrics=metrics)
    page = Page(render(plan))
    assert re.search(
        r"language\s*documents read\s*length\s*kept\s*tokens\s*deu\s*10\s*3\s*7\s*1,234", page.text
    )
    assert re.search(r"alert\(1\).*\s*41\s*43\s*47", page.text)
    bars = [figure["data"] for figure in page.figures.values() if figure["data"][0]["type"] == "bar"]
    shares = [{bar["name"]: list(bar["x"]) for bar in data if bar["y"][0] == "deu (10)"} for data in bars]
    assert {"kept": [0.7], "length": [0.3]} in shares
