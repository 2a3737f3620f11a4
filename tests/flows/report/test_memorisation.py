"""Memorisation in the report: a table of everything, and lines over repetitions, prefixes and offsets."""

from __future__ import annotations

from collections.abc import Callable

from flows.planning.plan import Plan
from flows.report import render
from flows.report.figures import Style
from flows.report.memorisation import Cell, Memorised, Row
from flows.report.result_charts import results
from flows.report.results import Evaluation, undrawn
from specs.stages.memorisation import Memorisation
from tests.flows.report.page import Page
from tests.flows.report.report_store import add, store, trained

SPEC = Memorisation.model_validate(
    {"probes": "corpus", "prefixes": [100, 50], "offsets": [0, 7], "nucleus": {}}
)


def metrics() -> dict[str, float]:
    """Every metric that is planned, each with another value; intervals around it."""
    found = dict[str, float]()
    for index, name in enumerate(SPEC.metrics([0, 16, 8])):
        base = name.removesuffix("/low").removesuffix("/high")
        away = {"low": -0.0001, "high": 0.0001}.get(name.rpartition("/")[2], 0.0)
        found[name] = found.get(base, index / 1000) + away
    return found


def test_every_planned_metric_is_in_the_table() -> None:
    stored = metrics()
    table = Memorised.of(stored)
    assert table.repetitions == [0, 8, 16]
    assert sum(len(cells) for cells in table.rows.values()) == 3 * 2 * 2 * (2 + 2 * 4)
    name = "memorisation/nucleus/prefix-50/offset-7/rouge_l/16"
    assert table.rows[Row("rouge_l", "nucleus", 50, 7)][16] == Cell(
        stored[name], stored[f"{name}/low"], stored[f"{name}/high"]
    )
    assert undrawn([Evaluation("e", "e", "e", "e", stored)]) == ["memorisation/passes"]
    odd = {"memorisation/exact/8": 1.0, "memorisation/greedy/prefix-x/offset-0/exact/8": 1.0}
    assert Memorised.of(odd).rows == {} and undrawn([Evaluation("e", "e", "e", "e", odd)]) == list(odd)


def test_lines_run_over_one_number_and_hold_the_others() -> None:
    stored = metrics()
    table = Memorised.of(stored)

    def value(prefix: int, offset: int, repetitions: int) -> float:
        return stored[f"memorisation/greedy/prefix-{prefix}/offset-{offset}/rouge_l/{repetitions}"]

    assert table.lines("rouge_l", "repetitions")["greedy"] == {n: value(50, 0, n) for n in (0, 8, 16)}
    assert table.lines("rouge_l", "prefix")["greedy"] == {50: value(50, 0, 16), 100: value(100, 0, 16)}
    assert table.lines("rouge_l", "offset")["greedy"] == {0: value(50, 0, 16), 7: value(50, 7, 16)}
    one = {name: number for name, number in stored.items() if "prefix-50/offset-0" in name}
    assert Memorised.of(one).lines("rouge_l", "prefix") == {}
    assert Memorised.of({}).lines("rouge_l", "repetitions") == {}


def test_a_decoding_has_a_dash_and_a_model_a_colour() -> None:
    figures = results([Evaluation("e", "e", "e", "e", metrics())], {"e": Style("#123456")})
    assert [figure.title for figure in figures] == [
        "Memorisation: continued word for word",
        "Memorisation: Rouge-L",
        "Memorisation: longest common run",
        "Memorisation: type-token ratio",
        "Memorisation: Rouge-L",
        "Memorisation: Rouge-L",
    ]
    ratio = figures[3].plot["data"]
    assert {trace["name"]: (trace["line"]["dash"], trace["line"]["color"]) for trace in ratio} == {
        "e, greedy": ("solid", "#123456"),
        "e, nucleus": ("dash", "#123456"),
        "e, truth": ("dot", "#123456"),
    }


def test_the_page_has_one_table_with_intervals(planned: Callable[..., Plan]) -> None:
    plan = trained(planned())
    add(plan, "recalled", "evaluate", {"checkpoint": ("cooldown", 6)})
    store(plan, "recalled", metrics=metrics())
    page = Page(render(plan))
    assert page.text.count("Memorisation: recalled") == 1
    value = metrics()["memorisation/greedy/prefix-50/offset-0/exact/8"]
    tip = f"{value - 0.0001:.3f} to {value + 0.0001:.3f}"
    assert [attributes for tag, attributes in page.elements if tag == "td" and attributes.get("title") == tip]
