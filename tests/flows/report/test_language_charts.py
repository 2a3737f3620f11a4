"""The picture of what became of the documents of each language."""

from __future__ import annotations

from typing import Any

from flows.languages import LanguageCounts
from flows.report.language_charts import outcomes

HOSTILE = "<b>xx</b>"


def _bars(plot: dict[str, Any]) -> dict[str, dict[str, float]]:
    return {bar["name"]: dict(zip(bar["y"], bar["x"], strict=True)) for bar in plot["data"]}


def test_bars_are_shares_of_what_was_read_and_a_filter_has_one_colour() -> None:
    german = LanguageCounts("deu", 200, {"robots": 50, "length": 0}, 150, 9000)
    other = LanguageCounts(HOSTILE, 8, {"robots": 0, "length": 6}, 2, 10)
    nothing = LanguageCounts("", 0, {"robots": 0, "length": 0}, 0, 0)
    first, second = outcomes({"corpus/a": [german, other], "corpus/none": [], "corpus/b": [other, nothing]})
    assert (first.title, second.title) == ("Languages: corpus/a", "Languages: corpus/b")
    rows = ("deu (200)", "&lt;b&gt;xx&lt;/b&gt; (8)")
    assert _bars(first.plot) == {
        "kept": dict(zip(rows, (0.75, 0.25), strict=True)),
        "robots": dict(zip(rows, (0.25, 0), strict=True)),
        "length": dict(zip(rows, (0, 0.75), strict=True)),
    }
    assert _bars(second.plot) == {
        "kept": {rows[1]: 0.25, "not stated (0)": 0},
        "length": {rows[1]: 0.75, "not stated (0)": 0},
    }
    colours = [{bar["name"]: bar["marker"]["color"] for bar in one.plot["data"]} for one in (first, second)]
    assert colours[1].items() <= colours[0].items() and len(set(colours[0].values())) == 3
    assert [entry.text for entry in first.legend] == ["kept", "robots", "length"]
