"""The checked-in pictures are those that the code draws, and the plan is the plan that it says it is."""

from __future__ import annotations

import re

import pytest

from tools.picture import IMAGES, PICTURES, plan


@pytest.mark.parametrize("name", PICTURES)
def test_the_checked_in_pictures_are_those_that_the_code_draws(name: str) -> None:
    assert (IMAGES / name).read_text() == PICTURES[name](), "run: python -m tools.picture"


def test_what_reads_the_changed_stage_runs_again_and_nothing_else() -> None:
    boxes = dict(re.findall(r"font-weight='600'[^>]*>([^<]+)</text><text[^>]*>\w+ · (\w+)<", plan()))
    again = {name for name, action in boxes.items() if action == "run"}
    assert again == {"align-qrpo", "align-dpo", "evaluate-aligned-qrpo", "evaluate-aligned-dpo", "export"}
    assert boxes["tokenizer"] == boxes["preferences"] == "reuse"
