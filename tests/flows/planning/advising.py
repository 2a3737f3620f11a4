"""Recipes that advice is given for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from flows.planning.plan import Plan, make
from infra.store import Store
from specs.recipe import load
from tests.recipes import RECIPE, write_recipe

# A step of the last segment takes 54 s, its copy to the host 1.7 s; 351 s between checkpoints waste least.
FAILING = (
    (
        "cluster={gpu: H100, gpus_per_node: 4, mfu: 1e-9, storage_bandwidth: 4.4e-4, host_bandwidth: 4.4e-4,"
        " mean_time_between_failures: 10h}"
    ),
    "stages.pretrain.budget=40 steps",
)
REPEATED = (
    "stages.pretrain.budget=4000 steps",
    "stages.main.max_repetition=1e6",
    "stages.second.max_repetition=1e6",
)
Advised = Callable[..., dict[str, list[dict[str, Any]]]]


def plan_of(folder: Path, store: Store, *overrides: str, recipe: str = RECIPE) -> Plan:
    return make(load(write_recipe(folder, recipe), overrides), store)
