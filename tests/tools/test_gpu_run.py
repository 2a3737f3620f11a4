"""A run, and its killed and resumed twin, compared."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.e2e.conftest import SMOKE
from tools.gpu_run import Recipe, comparison, dependent, main


def test_only_what_is_made_from_a_stage_runs_twice(tmp_path: Path) -> None:
    plan = Recipe("specs/recipes/smoke-chat.yaml", []).plan(tmp_path)
    again = dependent(plan, "sft")
    assert again[0] == "sft" and {"preferences/pairs", "align-dpo", "merged", "aligned-model"} <= {*again}
    assert not {"cooldown", "evaluate", "chat/questions", "longer/2", "export"} & {*again}


def test_a_part_with_other_bits_is_named() -> None:
    text = comparison("after the checkpoint of step 5", {"cooldown": True, "evaluate": False})
    assert "were killed after the checkpoint of step 5, and" in text
    assert "It made 2 parts; **1 have the bits of the first run**. Others differ: `evaluate`." in text


@pytest.mark.slow
def test_a_killed_run_has_the_bits_of_another_one(tmp_path: Path) -> None:
    target = tmp_path / "page.md"
    changes = ["stages.cooldown.budget=300 steps", "cluster={gpu: H100}"]
    settings = [word for change in changes for word in ("--set", change)]
    stores = str(tmp_path / "stores")
    assert main([stores, "--recipe", SMOKE, "--stage", "cooldown", "--page", str(target), *settings])
    text = target.read_text()
    again = dependent(Recipe(SMOKE, changes).plan(tmp_path / "stores" / "killed"), "cooldown")
    assert len(again) > 1 and f"**{len(again)} have the bits of the first run**." in text
    (row,) = (line.split(" | ") for line in text.splitlines() if line.startswith("| cooldown |"))
    assert row[4] == "154k" and float(row[5].replace(",", "")) > 0 and row[6].endswith("% |")
    drawing = ElementTree.parse(tmp_path / "images" / "page.svg")
    assert len(drawing.findall(".//{http://www.w3.org/2000/svg}polyline")) == 2
