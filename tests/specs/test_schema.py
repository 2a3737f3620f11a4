"""The JSON Schema for editors, beside the files that people write."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from jsonschema import Draft202012Validator
from ruamel.yaml import YAML

from specs.document import parse
from specs.schema import json_schema
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


def test_the_checked_in_schema_is_the_models() -> None:
    stored = json.loads((ROOT / "specs" / "pipeline.schema.json").read_text())
    assert stored == json.loads(json.dumps(json_schema())), (
        "run: apertus schema -o specs/pipeline.schema.json"
    )
