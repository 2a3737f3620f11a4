"""Classifiers in the report: measures by label, calibration, thresholds, gates."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from flows.planning.plan import Plan, make
from flows.report import render
from flows.report.results import MOST_LANGUAGES, Classified
from infra.store import Store
from specs.recipe import load
from tests.flows.conftest import finish
from tests.flows.planning.parts.test_classifier import FASTTEXT, FILTER, RECIPE

Planned = Callable[..., Plan]
METRICS = {
    "accuracy": 0.875,
    "calibration_error": 0.0625,
    "precision/<b>": 0.75,
    "recall/<b>": 0.5,
    "languages": {"gsw": {"accuracy": 0.8125}, "roh": 3},
    "reliability": [{"low": 0.8, "high": 1.0, "documents": 8, "confidence": 0.9, "accuracy": 0.875}],
}
FACTS = {"thresholds": {"<b>": {"": {"p95": 0.25}, "deu": {"p95": 0.5}}}}


def test_the_report_shows_a_classifier(tmp_path: Path, store: Store) -> None:
    for name in ("good", "bad", "web"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.jsonl").write_text('{"text": "a", "language": "de"}\n')
    text = RECIPE.format(folder=tmp_path, training=FASTTEXT, filter=FILTER, assumed="")
    (tmp_path / "r.yaml").write_text(text)
    plan = make(load(tmp_path / "r.yaml"), store)
    assert 'id="classifiers"' not in render(plan)
    finish(plan, "quality/good", "quality/bad", "quality/web", "quality", metrics=METRICS, facts=FACTS)
    page = render(make(load(tmp_path / "r.yaml"), store))
    section = page[page.index('<section id="classifiers">') :]
    section = section[: section.index("</section>")]
    for shown in (
        "0.875",
        "0.0625",
        "&lt;b&gt;",
        "0.75",
        "deu",
        "p95",
        "accuracy",
        "gsw",
        "0.8125",
        "✓ pass",
    ):
        assert shown in section
    assert "<b>" not in section


def test_what_has_another_form_is_left_out_and_languages_are_bounded() -> None:
    many = {f"l{i}": {"p90": i / 1000} for i in range(MOST_LANGUAGES + 3)}
    found = Classified.of("c", {"reliability": 3, "recall/a": 1.0}, {"thresholds": {"a": many}}, [])
    assert (found.reliability, len(found.thresholds), found.more) == ([], MOST_LANGUAGES, 3)
    assert found.labels == {"a": {"recall": 1.0}} and found.percentiles == ["p90"]
    assert Classified.of("c", {"languages": 3}, {"thresholds": ["x"]}, []).thresholds == []
