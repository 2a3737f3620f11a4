"""The JSON Schema for editors, beside the files that people write."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from ruamel.yaml import YAML

from specs.document import parse
from specs.schema import json_schema
from tests.recipes import CHAT
from tests.specs.composing import BASE, VARIANTS

pytestmark = pytest.mark.usefixtures("beside_the_base")
SCHEMA = Draft202012Validator(json_schema())
ROOT = Path(__file__).resolve().parents[2]
RECIPES = sorted((ROOT / "specs" / "recipes").glob("*.yaml"))


def test_the_schema_is_one() -> None:
    Draft202012Validator.check_schema(SCHEMA.schema)


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.name)
def test_the_schema_allows_every_recipe(recipe: Path) -> None:
    assert list(SCHEMA.iter_errors(YAML(typ="safe").load(recipe))) == []


@pytest.mark.parametrize(
    ("text", "valid"),
    [
        (BASE, True),
        (
            VARIANTS.replace("fast", "1")
            .replace("9 bananas", "9 steps")
            .replace("        sequence_lenght: 1\n", ""),
            True,
        ),
        (VARIANTS.replace("fast", "1"), False),
        (
            BASE.replace("lr: 1e-2", "lr: ${lr}").replace("16 steps", "${n} bananas")
            + "variables: {lr: 1}\n",
            True,
        ),
        (BASE.replace("lr: 1e-2", "lr: fast"), False),
        (BASE.replace("    budget: 6 steps\n", ""), False),
        (
            BASE.replace(
                "    budget: 6 steps\n", "    matrix: {a: {budget: 6 steps}, b: {budget: 7 steps}}\n"
            ),
            True,
        ),
        (
            BASE.replace(
                "    budget: 6 steps\n",
                "    budget: 6 steps\n    matrix: {optimizer.lr: [1e-3], sequence_length: '${x}'}\n",
            ),
            True,
        ),
        (BASE.replace("    budget: 6 steps\n", "    matrix: {a: {bugdet: 6 steps}}\n"), False),
        (BASE.replace("    budget: 6 steps\n", "    matrix: []\n"), False),
        (
            "stages: {pretrain: {optimizer: {lr: 1}, goldfish: null}, export: null}\nextends: base.yaml\n",
            True,
        ),
        ("stages: {pretrain: {optimizer: {lrr: 1}}}\nextends: base.yaml\n", False),
        ("sources: {notes: {limit: 3}}\nstages: {}\nextends: base.yaml\n", True),
        ("sources: {notes: {limit: 3}}\nstages: {}\n", False),
        ("extends: 3\n", False),
    ],
)
def test_schema_allows_fields_stated_in_the_extended_file(text: str, valid: bool) -> None:
    assert (list(SCHEMA.iter_errors(parse(text, "f").data)) == []) is valid


def mappings(value: Any, path: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    """The paths of all mappings in a value."""
    if isinstance(value, dict):
        yield path
    for key, item in value.items() if isinstance(value, dict) else enumerate(value):
        if isinstance(item, (dict, list)):
            yield from mappings(item, (*path, key))


WHOLE = json.loads(json.dumps(YAML(typ="safe").load(CHAT.format(documents="documents"))))  # without aliases
WHOLE["stages"]["corpus"]["sources"]["notes"]["filters"] = [{"filter": "length", "min_characters": 3}]
WHOLE["stages"]["pretrain"]["model"]["attention"] = {"sparse": "hash"}
WHOLE["stages"]["qrpo"]["matrix"] = {"a": {"optimizer": {"lr": 1}}, "seed": [1, 2]}
FREE = {"sources", "stages", "weights", "mixture", "global_batch_size", "matrix"}
"""Mappings with names of one's own."""


@pytest.mark.parametrize("partial", [False, True], ids=["whole", "extends"])
def test_a_typo_is_an_error_of_its_field_and_of_nothing_around_it(partial: bool) -> None:
    recipe = WHOLE | ({"extends": "base.yaml"} if partial else {})
    for path in mappings(recipe):
        if path and path[-1] in FREE:
            continue
        changed = copy.deepcopy(recipe)
        reduce(getitem, path, changed)["tpyo"] = 1
        (error,) = SCHEMA.iter_errors(changed)
        assert (tuple(error.absolute_path), error.validator) == (path, "additionalProperties")
        assert "'tpyo' was unexpected" in error.message


@pytest.mark.parametrize("partial", [False, True], ids=["whole", "extends"])
def test_a_value_of_a_wrong_type_is_an_error_of_its_field(partial: bool) -> None:
    recipe = WHOLE | ({"extends": "base.yaml"} if partial else {})
    for path in mappings(recipe):
        for key, value in reduce(getitem, path, recipe).items():
            if isinstance(value, (int, float)):
                changed = copy.deepcopy(recipe)
                reduce(getitem, path, changed)[key] = {"no": "number"}
                assert {
                    tuple(error.absolute_path)[: len(path) + 1] for error in SCHEMA.iter_errors(changed)
                } == {(*path, key)}, (path, key)


def test_the_checked_in_schema_is_the_models() -> None:
    stored = json.loads((ROOT / "specs" / "pipeline.schema.json").read_text())
    assert stored == json.loads(json.dumps(json_schema())), (
        "run: apertus schema -o specs/pipeline.schema.json"
    )
