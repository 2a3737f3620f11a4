"""The picture of the README is the plan that it says it is."""

from __future__ import annotations

import re

from tools.picture import PICTURE, picture


def test_the_checked_in_picture_is_the_plan() -> None:
    assert PICTURE.read_text() == picture(), "run: python -m tools.picture"


def test_what_reads_the_changed_stage_runs_again_and_nothing_else() -> None:
    boxes = dict(re.findall(r"font-weight='600'[^>]*>([^<]+)</text><text[^>]*>\w+ · (\w+)<", picture()))
    again = {name for name, action in boxes.items() if action == "run"}
    assert again == {"align-qrpo", "align-dpo", "evaluate-aligned-qrpo", "evaluate-aligned-dpo", "export"}
    assert boxes["tokenizer"] == boxes["preferences"] == "reuse"
