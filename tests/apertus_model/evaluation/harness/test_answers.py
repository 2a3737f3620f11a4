from __future__ import annotations

from pathlib import Path
from typing import Any

from apertus_model.evaluation.harness.answers import read_answers, rows_of, shown, write_answers


def sample(index: int, score: float, **more: Any) -> dict[str, Any]:
    return {
        "doc_id": index,
        "filter": "none",
        "arguments": [(f"question {index}", {"until": []})],
        "resps": [["an answer"]],
        "filtered_resps": ["answer"],
        "target": {"a", "b"},
        "metrics": ["score"],
        "score": score,
    } | more


def test_answers_are_read_as_they_were_written(tmp_path: Path) -> None:
    choice = sample(
        1,
        1.0,
        arguments=[("q", " a"), ("q", " b")],
        resps=[[(-1.5, True)], [(-2.5, False)]],
        filtered_resps=[(-1.5, True), (-2.5, False)],
        target=0,
    )
    whole = sample(2, (-7.0, 3), arguments=[("text",)], resps=[[-7.0]], filtered_resps=[-7.0], target="")
    write_answers(tmp_path / "a", list(rows_of({"t": [sample(0, 0.0)], "c": [choice], "w": [whole]})))
    c, t, w = read_answers(tmp_path / "a")
    assert (c["prompts"], c["continuations"]) == (["q", "q"], [" a", " b"])
    assert (c["log_likelihoods"], c["greedy"], c["target"]) == ([-1.5, -2.5], [True, False], 0)
    assert (t["answers"], t["filtered"], t["target"]) == (["an answer"], ["answer"], ["a", "b"])
    assert (w["log_likelihoods"], w["metrics"]) == ([-7.0], {"score": [-7.0, 3]})


def test_the_worst_answers_are_shown_and_some_others() -> None:
    rows = list(rows_of({"t": [sample(index, index / 10) for index in range(10)]}))
    for higher, worst in ((True, [0, 1, 2]), (False, [9, 8, 7])):
        found = shown(rows, {"score": higher})
        assert [one["document"] for one in found if one["chosen"] == "worst"] == worst
        others = [one["document"] for one in found if one["chosen"] == "random"]
        assert len(set(others) - set(worst)) == 3
    assert shown(rows, {}) == shown(list(reversed(rows)), {})


def test_the_worst_text_has_the_least_likelihood_by_word() -> None:
    whole = [sample(index, (-float(index + 1), 1), resps=[[-1.0]], arguments=[("x",)]) for index in range(5)]
    found = shown(list(rows_of({"w": whole})), {"score": False})
    assert [one["document"] for one in found if one["chosen"] == "worst"] == [4, 3, 2]
