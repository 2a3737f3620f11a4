"""Compared tokenizers in a report: the picture, the tables, and damaged or hostile files."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from flows.planning.plan import Plan
from flows.report import render
from flows.report.content import collect
from flows.report.language_charts import by_cost, parities
from flows.report.results import ComparedTokenizers
from specs.stages.evaluate_tokenizers import EvaluateTokenizersStage
from specs.tokenizer_comparison import Comparison
from tests.flows.report.page import Page
from tests.flows.report.report_store import add, store, trained

Planned = Callable[..., Plan]
HOSTILE = "</script><img src=x onerror=alert(2)>"


def estimate(value: float) -> dict[str, float]:
    return {"value": value, "low": value - 0.25, "high": value + 0.5}


def comparison(
    languages: dict[str, tuple[float, float]], names: tuple[str, str] = ("a", "b")
) -> dict[str, Any]:
    """A stored comparison, with the parities of two tokenizers in each language."""
    tokenizers = {
        name: {
            "vocabulary": {"vocabulary": 512, "vocabulary_used": 0.5},
            "measures": {"gini": estimate(0.3 + index / 10)},
            "difference": {"gini": estimate(0.125)} if index else {},
            "languages": {
                language: {
                    "measures": {"parity": estimate(values[index]), "tokens_per_word": None},
                    "difference": {},
                    "unknown_tokens": 0,
                    "changed_lines": 0,
                }
                for language, values in languages.items()
            },
        }
        for index, name in enumerate(names)
    }  # fmt: skip
    return {
        "lines": 997,
        "languages": list(languages),
        "without_words": ["ja"],
        "parity_to": "en",
        "against": names[0],
        "tokenizers": tokenizers,
    }


LANGUAGES = {"de": (1.5, 2.0), "en": (1.0, 1.0), "ja": (4.0, 1.0)}


def test_languages_are_sorted_by_the_mean_parity_and_whiskers_are_intervals() -> None:
    found = Comparison.model_validate(comparison(LANGUAGES))
    assert by_cost(found) == ["ja", "de", "en"]
    figure = parities(ComparedTokenizers("study", ["b", "a"], found))
    first, second = figure.plot["data"]
    assert (first["name"], list(first["y"]), list(first["x"])) == ("b", ["ja", "de", "en"], [1.0, 2.0, 1.0])
    assert list(second["x"]) == [4.0, 1.5, 1.0]
    assert list(first["error_x"]["array"]) == [0.5] * 3 and list(first["error_x"]["arrayminus"]) == [0.25] * 3
    assert [entry.text for entry in figure.legend] == ["b: Gini 0.400", "a: Gini 0.300"]


def with_study(planned: Planned, document: Any) -> Plan:
    plan = trained(planned())
    stage = {
        "kind": "evaluate_tokenizers",
        "tokenizers": {"b": "tokenizer", "a": "tokenizer"},
        "sources": ["notes"],
        "parity_to": "en",
        "gates": [{"metric": "a/parity/de", "max": 1.25}],
    }
    plan.pipeline.stages["study"] = EvaluateTokenizersStage.model_validate(stage)
    add(plan, "study", "evaluate_tokenizers", {})
    store(plan, "study", metrics={"a/parity/de": 1.5}, files={"evaluation.json": document})
    return plan


def test_a_report_has_the_tables_of_a_comparison_and_its_gates(planned: Planned) -> None:
    plan = with_study(planned, comparison(LANGUAGES))
    (compared,) = collect(plan).tokenizers
    assert compared.names == ["b", "a"] and [gate.value for gate in compared.gates] == [1.5]
    text = "".join(Page(render(plan)).text.split())
    for shown in (
        "997 lines in each of de, en, ja.",
        "Words are not measured in ja",
        "Gini coefficient of the tokens per line of the languages 0.4 0.15 to 0.9 0.3 0.05 to 0.8",
        "study: difference to a",
        "study a/parity/de ≤ 1.25 1.5 ✕ fail",
        "language b a ja 1 0.75 to 1.5 4 3.75 to 4.5 de 2 1.75 to 2.5",
    ):
        assert shown.replace(" ", "") in text, shown


@pytest.mark.parametrize(
    "damage", [[], {"lines": 3}, comparison({"de": (1, 1)}) | {"languages": ["de", "fr"]}]
)
def test_a_comparison_of_another_form_is_a_note(planned: Planned, damage: Any) -> None:
    run = collect(with_study(planned, damage))
    assert run.tokenizers == []
    assert any("evaluation.json of study is not a comparison" in note for note in run.notes)


def test_hostile_names_stay_text(planned: Planned) -> None:
    found = Comparison.model_validate(comparison({HOSTILE: (1, 2)}, (HOSTILE, "b")))
    figure = parities(ComparedTokenizers(HOSTILE, [HOSTILE, "b"], found))
    shown = [(trace["name"], list(trace["y"]), trace["hovertemplate"]) for trace in figure.plot["data"]]
    assert "&lt;img" in str(shown) and "<img" not in str(shown) + str(figure.plot["layout"])
    page = Page(render(with_study(planned, comparison({HOSTILE: (1, 2)}))))
    assert HOSTILE in page.text and not [tag for tag, _ in page.elements if tag == "img"]
