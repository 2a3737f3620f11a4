"""The page of the studies is made from stored results, and compares machines."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest

from flows.report.claims import Tested
from flows.report.experiments import Measured
from specs.figures import Claim
from tools.studies import Study, page, picture

CLAIM = Claim(paper="0.1 <less>", of="B", than="A", expected="below")
SHOWN = Tested("B is <better> than A", CLAIM, Measured(-2.0, -3.0, -1.0), 3)
LARGE = Tested("B is <better> than A", CLAIM, Measured(-2.0, -3.0, 1234.0), 3)
LEVEL = Tested("B is <better> than A", CLAIM, Measured(1.0, -1.0, 3.0), 3)
MISSING = Tested("C is level", CLAIM, None, 0)


def study(*claims: Tested) -> Study:
    return Study("some-mini", "Some study", 34, 252.0, list(claims))


def test_a_verdict_that_differs_between_machines_is_unstable() -> None:
    text = page([[study(SHOWN, MISSING)], [study(LEVEL, MISSING)]])
    assert "| -2 (-3 to -1), 3 seeds<br>1 (-1 to 3), 3 seeds | unstable: shown, not shown |" in text
    assert "| - | not measured |" in text or "| -<br>- | not measured |" in text
    assert "1 measured claim" in text and "34 parts, 4.2 min" in text


def test_a_machine_without_a_result_makes_no_verdict_unstable() -> None:
    text = page([[study(Tested("B is <better> than A", CLAIM, None, 0))], [study(SHOWN)]])
    assert "| -<br>-2 (-3 to -1), 3 seeds | shown |" in text


def test_the_picture_draws_what_the_paper_says_on_the_right() -> None:
    root = ElementTree.fromstring(picture(study(SHOWN, LEVEL, MISSING)))
    circles = [float(one.get("cx") or 0) for one in root.iter("{http://www.w3.org/2000/svg}circle")]
    middle = 350 + 130
    assert len(circles) == 2 and circles[0] > middle > circles[1]
    assert "-2 (-3 to 1,234)" in picture(study(LARGE))
    assert circles[0] - middle == pytest.approx(130 * 2 / (3 * 1.05), abs=0.2)
