"""A file is read whole: every problem at once, each with file, line, field, value and fix."""

from __future__ import annotations

from pathlib import Path

import pytest

from specs.recipe import load
from tests.recipes import edit, line_of, problems, write_recipe

ROOT = Path(__file__).resolve().parents[2]


def test_all_problems_of_a_file_are_reported_at_once(tmp_path: Path) -> None:
    path = edit(
        write_recipe(tmp_path),
        ("sequence_length", "sequence_lenght"),
        ("budget: 6 steps", "budget: 6 bananas"),
        ("lr: 1e-2", "lr: fast"),
        ("sources: [corpus/notes]", "sources: [corpus/nothing]"),
        ("after: [evaluate]", "after: [evaluation]"),
    )
    text = problems(path)
    expected = [
        (
            f"tiny.yaml:{line_of(path, 'lenght')}: stages.pretrain.sequence_lenght: there is no field",
            "did you mean 'sequence_length'?",
        ),
        (
            f"tiny.yaml:{line_of(path, 'bananas')}: stages.cooldown.budget: 'bananas' is not a unit",
            "use tokens, samples or steps",
        ),
        (f"tiny.yaml:{line_of(path, 'fast')}: stages.pretrain.optimizer.lr: 'fast'", "valid number"),
        ("stages.evaluate.sources[0]: corpus 'corpus' has no part 'nothing'", "use one of notes"),
        ("stages.export.after[0]: there is no stage 'evaluation'", "did you mean 'evaluate'?"),
    ]
    for where, fix in expected:
        line = next((line for line in text.splitlines() if where in line), None)
        assert line is not None, f"{where} is not in\n{text}"
        assert fix in line


def test_overrides_are_applied(tmp_path: Path) -> None:
    pipeline = load(write_recipe(tmp_path), ["stages.cooldown.optimizer.lr=2e-4", "launch.processes=2"])
    assert pipeline.stages["cooldown"].optimizer.lr == 2e-4  # type: ignore[attr-defined]  # a cooldown has one
    assert pipeline.launch.processes == 2


def test_missing_file_suggests_the_nearest_name(tmp_path: Path) -> None:
    (tmp_path / "mini.yaml").touch()
    assert (
        problems(tmp_path / "mni.yaml")
        == f"{tmp_path / 'mni.yaml'}: there is no such file. Fix: did you mean 'mini.yaml'?"
    )
    nowhere = tmp_path / "none" / "mini.yaml"
    assert (
        problems(nowhere) == f"{nowhere}: there is no such file. Fix: there is no folder '{nowhere.parent}'."
    )


@pytest.mark.parametrize(
    "recipe", sorted((ROOT / "specs" / "recipes").glob("*.yaml")), ids=lambda path: path.name
)
def test_every_recipe_loads_and_points_to_the_schema(recipe: Path) -> None:
    load(recipe)
    assert recipe.read_text().splitlines()[0] == "# yaml-language-server: $schema=../pipeline.schema.json"
