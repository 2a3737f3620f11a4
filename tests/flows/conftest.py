"""Plans over a store in which parts can be declared finished without running them."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import typer.testing

from flows.planning.graph import Node
from flows.planning.plan import Plan, make
from flows.planning.run_records import Records
from infra.store import Attempt, Store
from specs.job import InputRef, Job
from specs.recipe import load
from specs.stages.corpus import CorpusPart
from tests.infra.sealed import sealed
from tests.jobs import job_at
from tests.recipes import CHAT, write_recipe

# All commands are made of their functions' signatures anew for every call.
typer.testing._get_command = cache(typer.testing._get_command)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    opened = Store.open(str(tmp_path / "store"))
    opened.initialise()
    return opened


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    return write_recipe(tmp_path)


@pytest.fixture
def planned(recipe: Path, store: Store) -> Callable[..., Plan]:
    """`planned("a.b=c", ...)`: the plan of the tiny recipe with overrides."""
    return lambda *overrides: make(load(recipe, overrides), store)


@pytest.fixture
def chat(tmp_path: Path, store: Store) -> Callable[..., Plan]:
    """The tiny recipe with everything behind it, and overrides."""
    path = write_recipe(tmp_path, CHAT)
    return lambda *overrides: make(load(path, overrides), store)


@pytest.fixture
def done(planned: Callable[..., Plan]) -> Plan:
    """The tiny recipe, run: with files, metrics, a history, and what a manifest records of the source."""
    from tests.flows.finished import run_tiny  # which imports the command line

    return run_tiny(planned)


def finish(
    plan: Plan,
    *names: str,
    until: int | None = None,
    metrics: dict[str, Any] | None = None,
    facts: dict[str, Any] | None = None,
) -> None:
    """Commits parts (all by default) as if they had run; a training part up to step `until`, with a
    manifest at its own end."""
    Records(plan.store, plan.pipeline.name).write(plan.graph, {})
    for name in names or plan.graph.nodes:
        _commit(plan, plan.graph.nodes[name], until, metrics or {}, facts or {})


def _commit(
    plan: Plan, node: Node, until: int | None, metrics: dict[str, Any], facts: dict[str, Any]
) -> None:
    attempt = Attempt(job_of(plan, node), plan.store)
    attempt.begin()
    if node.end_step is None:
        tokens = {"train": {"tokens": 40_000}} if isinstance(node.part, CorpusPart) else {}
        attempt.commit(metrics={"perplexity": 10.0} | metrics | tokens, facts=facts)
        return
    step = until or node.end_step
    folder = attempt.folder(Attempt.checkpoint_folder(step))
    plan.store.write_once(f"{folder}/weights", b"weights")
    attempt.commit_checkpoint(step, {"tokens": 0}, files=sealed(attempt, step))
    if step == node.end_step:
        attempt.commit(metrics=metrics, facts=facts, step=step)


def job_of(plan: Plan, node: Node) -> Job:
    """What the launcher would hand over, without a spec."""
    inputs = {
        role: InputRef(kind=read.kind, fingerprint=read.fingerprint, name=read.name, step=read.step)
        for role, read in node.inputs.items()
    }
    about = {"node": node.name, "version": node.version, "identity": node.identity, "inputs": inputs}
    name = f"attempt-{node.name.replace('/', '-')}"
    return job_at(node.path, plan.store, Path(plan.store.root), name, **about)
