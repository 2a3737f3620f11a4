"""Plans of the tiny recipe with other mixtures, and what is advised for one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flows.planning.plan import Plan, make
from infra.store import Store
from specs.recipe import load
from tests.flows.planning.advising import Advised, plan_of
from tests.flows.planning.mixing import BASE, MAIN, SECOND
from tests.recipes import CHAT, write_recipe


@pytest.fixture
def mixed(tmp_path: Path, store: Store) -> Callable[..., Plan]:
    """`mixed("a.b=c", ..., main=, second=)`: the plan of the tiny recipe with other mixtures."""

    def plan(*overrides: str, main: str = MAIN, second: str = SECOND) -> Plan:
        quote = [text.replace("{", "{{").replace("}", "}}") for text in (main, second)]
        return make(
            load(
                write_recipe(tmp_path, BASE.replace("{main}", quote[0]).replace("{second}", quote[1])),
                overrides,
            ),
            store,
        )

    return plan


@pytest.fixture
def advised(tmp_path: Path, store: Store) -> Advised:
    """Advice by code, as in `plan --json`."""

    def advised(*overrides: str, recipe: str = CHAT) -> dict[str, list[dict[str, Any]]]:
        found: dict[str, list[dict[str, Any]]] = {}
        for advice in plan_of(tmp_path, store, *overrides, recipe=recipe).to_json()["advice"]:
            found.setdefault(advice["code"], []).append(advice)
        return found

    return advised
