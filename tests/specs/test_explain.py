"""An override that Pydantic refuses is a problem that says what is meant."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.recipes import problems, write_recipe


@pytest.mark.parametrize(
    ("assignment", "message"),
    [
        (
            "stages.cooldown.optimizer.lrr=1",
            "the override matches nothing: there is no field 'lrr' here. Fix: did you mean 'lr'?",
        ),
        (
            "stages.cooldwn.budget=1 steps",
            "the override matches nothing: there is no stage 'cooldwn'. Fix: did you mean 'cooldown'?",
        ),
        (
            "lunch.processes=2",
            "the override matches nothing: there is no field 'lunch' here. Fix: did you mean 'launch'?",
        ),
    ],
)
def test_an_override_that_matches_nothing_is_an_error(tmp_path: Path, assignment: str, message: str) -> None:
    text = problems(write_recipe(tmp_path), assignment)
    assert message in text
    assert f"--set {assignment}" in text
