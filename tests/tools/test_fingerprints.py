"""The fingerprints of the shipped recipes are pinned.

When this fails, stores are made again from the named part on. If its results have changed, raise the VERSION
of its kind, say so in the changelog, and run `python -m tools.fingerprints > tests/fingerprints.json`; else
find out what has entered the fingerprint.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from specs.recipe import load
from tools.fingerprints import RECIPES, pinned

PINNED = json.loads((Path(__file__).parents[1] / "fingerprints.json").read_text())


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.stem)
def test_the_parts_of_a_recipe_have_the_fingerprints_that_stores_have(recipe: Path) -> None:
    found, before = pinned(load(recipe)), PINNED[recipe.stem]
    changed = [name for name in found if found[name] != before.get(name)]  # inputs first
    assert not changed, f"{changed[0]} is new or has another fingerprint, and {len(changed) - 1} after it"
    assert found.keys() == before.keys()


def test_every_pinned_recipe_is_shipped() -> None:
    assert PINNED.keys() == {recipe.stem for recipe in RECIPES}
