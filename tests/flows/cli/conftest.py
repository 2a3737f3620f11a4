"""Plans of large recipes, which take a second each."""

from __future__ import annotations

from pathlib import Path

import pytest

from flows.planning.plan import Plan, make
from infra.store import Store
from specs.recipe import load

RECIPES = Path(__file__).parents[3] / "specs" / "recipes"


@pytest.fixture(scope="session")
def plans(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Plan]:
    store = Store.open(str(tmp_path_factory.mktemp("store")))
    names = ("apertus-8b", "apertus-70b", "apertus-1.5b-100b", "wso")
    return {name: make(load(RECIPES / f"{name}.yaml"), store, ask_network=False) for name in names}
