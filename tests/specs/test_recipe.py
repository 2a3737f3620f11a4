"""A file is read whole: every problem at once, each with file, line, field, value and fix."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from specs.compose import compose
from specs.errors import FieldPath, SpecError
from specs.recipe import load, validate
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
        (f"tiny.yaml:{line_of(path, 'fast')}: stages.pretrain.optimizer.lr: 'fast'", "write a number"),
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


RECIPES = sorted((ROOT / "specs" / "recipes").glob("*.yaml"))
VALUES = (
    [],
    {},
    [1],
    {"a": 1},
    0,
    -1,
    1,
    3,
    2.5,
    1e30,
    True,
    None,
    "",
    "x",
    "0 steps",
    "1 steps",
    "1T tokens",
)


def _places(value: Any, path: FieldPath = ()) -> Iterator[FieldPath]:
    for key, item in (
        value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    ):
        yield (*path, key)
        yield from _places(item, (*path, key))


def _edited(data: Any, draw: random.Random) -> str:
    """Removes, repeats or replaces something; returns what it did."""
    *above, last = path = draw.choice(list(_places(data)))
    for part in above:
        data = data[part]
    if draw.random() < 0.2:
        del data[last]
        return f"removed {path}"
    beside = data.values() if isinstance(data, dict) else data
    data[last] = copy.deepcopy(draw.choice([*VALUES, *beside]))
    return f"set {path} to {data[last]!r}"


def _stays_explained(recipe: Path, edits: int) -> None:
    document = compose(recipe)
    sound, draw = document.data, random.Random(recipe.name)
    for _ in range(edits):
        document.data = copy.deepcopy(sound)
        done = _edited(document.data, draw)
        try:
            validate(document)
        except SpecError as error:
            assert error.problems and all(problem.where for problem in error.problems), done
        except Exception as error:
            raise AssertionError(done) from error


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.name)
def test_an_edited_recipe_is_right_or_its_mistakes_are_named(recipe: Path) -> None:
    _stays_explained(recipe, 4)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.name)
def test_a_recipe_edited_in_many_ways_is_right_or_its_mistakes_are_named(recipe: Path) -> None:
    _stays_explained(recipe, 60)
