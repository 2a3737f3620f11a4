"""The page of the studies is made from stored results, and compares machines."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest

from flows.report.claims import Tested
from flows.report.experiments import Measurement
from flows.report.ranks import Rank
from specs.figures import Claim, FigureSpec
from specs.pipeline import Pipeline
from specs.recipe import load
from tools.studies import PAGE, RECIPES, Number, Result, Study, identity, page, picture, recorded

CLAIM = Claim(paper="0.1 <less>", of="B", than="A", expected="below")
SHOWN = Tested("B is <better> than A", CLAIM, Measurement(-2.0, -3.0, -1.0), 3)
LARGE = Tested("B is <better> than A", CLAIM, Measurement(-2.0, -3.0, 1234.0), 3)
LEVEL = Tested("B is <better> than A", CLAIM, Measurement(1.0, -1.0, 3.0), 3)


def study(*machines: tuple[Tested, ...]) -> Study:
    """Of the claims' numbers on each machine."""
    stage = {"stage": "sft-{variant}", "metric": "loss"}
    series = {"B": ["b"], "A": ["a"]}
    claims = {claim.text: claim.claim for claim in machines[0]}
    figure = FigureSpec.model_validate({"title": "Loss", "y": stage, "series": series, "claims": claims})
    named = {"name": "some-mini", "description": "Some study", "figures": {"loss": figure}}
    pipeline = load(RECIPES[0]).model_copy(update=named)
    numbers = [{f"loss: {claim.text}": Number(*claim[2:]) for claim in claims} for claims in machines]
    facts = {"study": "some-mini", "identity": "1", "date": "2026-11-29", "python": "3.11", "parts": 34}
    results = [
        Result.model_validate(
            facts | {"machine": str(index), "seconds": 504.0 / (1 + index), "claims": claims}
        )
        for index, claims in enumerate(numbers)
    ]
    return Study(pipeline, "1", results)


def test_a_verdict_that_differs_between_machines_is_unstable() -> None:
    text = page([study((SHOWN,), (LEVEL,))])
    assert "| -2 (-3 to -1), 3 seeds<br>1 (-1 to 3), 3 seeds | unstable: shown, not shown |" in text
    assert "1 measured claim" in text and "34 parts, 2 machines, 4.2 min" in text


def test_a_machine_without_a_number_makes_no_verdict_unstable() -> None:
    text = page([study((SHOWN._replace(number=None, seeds=0),), (SHOWN,))])
    assert "| -2 (-3 to -1), 3 seeds | shown |" in text and "1 measured claim" in text


def test_a_claim_that_no_machine_measured_has_no_verdict() -> None:
    pipeline, identity, _ = study((SHOWN,))
    text = page([Study(pipeline, identity, [])])
    assert "| - | not measured |" in text and "0 measured claims" in text
    assert "not measured" in picture(Study(pipeline, identity, []))


def test_ranks_are_recorded_and_shown_by_machine() -> None:
    made = study((SHOWN,), (SHOWN,))
    ranked = [Rank("B", 1, 1, 2, ["A"]), Rank("A", 2, 1, 2, ["B"])]
    result = made.results[1].model_copy(update={"ranks": {"loss": ranked}})
    again = Result.model_validate_json(result.model_dump_json(exclude_defaults=True))
    assert again == result
    text = page([made._replace(results=[made.results[0], again])])
    assert "Loss, on machine 1:" in text and "Loss, on machine 0:" not in text
    assert "| B | 1 (1 to 2) | A |\n| A | 2 (1 to 2) | B |" in text


def test_the_picture_draws_what_the_paper_says_on_the_right() -> None:
    text = picture(study((SHOWN,), (LEVEL,)))
    circles = [
        float(circle.get("cx") or 0)
        for circle in ElementTree.fromstring(text).iter("{http://www.w3.org/2000/svg}circle")
    ]
    middle = 350 + 130
    assert len(circles) == 2 and circles[0] > middle > circles[1]
    assert circles[0] - middle == pytest.approx(130 * 2 / (3 * 1.05), abs=0.2)
    assert "-2 (-3 to 1,234)" in picture(study((LARGE,)))


def test_the_identity_of_a_study_ignores_prose_alone() -> None:
    pipeline = load(RECIPES[0])
    name, figure = next((name, figure) for name, figure in pipeline.figures.items() if figure.claims)
    text, claim = next(iter(figure.claims.items()))

    def changed(**fields: str) -> Pipeline:
        claims = figure.claims | {text: claim.model_copy(update=fields)}
        return pipeline.model_copy(
            update={"figures": pipeline.figures | {name: figure.model_copy(update={"claims": claims})}}
        )

    assert identity(changed(paper="another wording")) == identity(pipeline)
    assert identity(changed(axis="x" if claim.axis == "y" else "y")) != identity(pipeline)


def test_the_page_is_that_of_the_record() -> None:
    assert PAGE.read_text() == page(list(recorded()))
