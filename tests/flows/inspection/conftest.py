"""A plan whose data are made."""

from __future__ import annotations

import pytest

from flows.execution.runner import Runner
from flows.planning.plan import Plan, make
from infra.store import Artifact, Store
from specs.launch import Launch
from specs.recipe import load
from tests.flows.inspection.looking import OVERRIDES
from tests.jobs import run_stage
from tests.recipes import CHAT, write_recipe

DATA = ("tokenizer", "corpus", "mixture", "packing", "conversations")


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Plan:
    """The chat recipe with its data made, in this process, and nothing trained."""
    folder = tmp_path_factory.mktemp("inspect")
    store = Store.open(str(folder / "store"))
    store.initialise()
    recipe = write_recipe(folder, CHAT)
    plan = make(load(recipe, OVERRIDES), store)
    runner = Runner(plan, None)  # type: ignore[arg-type]  # nobody watches
    for name, node in plan.graph.nodes.items():
        if node.kind in DATA and not Artifact(store, node.path).complete:
            scratch = folder / "scratch" / name.replace("/", "-")
            scratch.mkdir(parents=True)
            lease = runner._turn(node)
            assert lease is not None
            with lease:
                job = runner._job(node, plan.steps[name], scratch, lease).model_copy(
                    update={"launch": Launch(workers={"count": 1})}
                )
                run_stage(job)
    return make(load(recipe, OVERRIDES), store)
