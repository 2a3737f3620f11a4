"""What a run has made is what its last record names, also where `@best:` and selections come out while it
runs."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from flows.execution import flow as pipeline
from flows.execution.flow import Run, Session, walk
from flows.planning.graph import Node
from flows.planning.plan import Plan, make
from infra.store import Artifact, Attempt, Store, runs
from infra.store.maintenance.garbage import survey
from infra.store.writing.retention import referred_steps
from specs.profiles import Profile
from specs.recipe import load
from tests.flows.conftest import job_of
from tests.flows.execution.notes import Notes
from tests.infra.sealed import sealed
from tests.recipes import RECIPE as TINY
from tests.recipes import write_recipe

# where the loss is lowest; the last step, of pretrain/3, stands in for it until that is known
BEST = "pretrain/1", 8
CHOSEN = 1  # the candidate that the selection chooses; the first one stands in for it
LOSSES = {8: 1.0, 12: 3.0, 16: 2.0}
RECIPE = (
    TINY.replace("from: pretrain\n", "from: pretrain@best:val_loss\n").replace(
        "from: cooldown, after: [evaluate]", "from: chosen"
    )
    + """\
  longer: {{kind: cooldown, from: pretrain@best:val_loss, mixture: main, budget: 7 steps,
    validation: {{interval: 0}}}}
  evaluate-longer: {{kind: evaluate, from: longer, sources: [corpus/notes], samples: 4}}
  chosen: {{kind: select, evaluations: [evaluate, evaluate-longer], metric: perplexity}}
"""
)


class Parts:
    """In place of the task: a part is committed in the moment in which it is submitted, to the checkpoints
    that it names. Until `stop`."""

    def __init__(self, stop: str = "") -> None:
        self.stop = stop
        self.made: list[tuple[str, int | None]] = []

    def with_options(self, **_: Any) -> Parts:
        return self

    def submit(self, name: str, session: Session, *, wait_for: list[Any], return_state: bool) -> Any:
        node = session.runner.plan.graph.nodes[name]
        assert {future.name for future in wait_for} == session.needs()[name]
        if name == self.stop:
            raise KeyboardInterrupt
        # before it is made
        assert runs.last(session.plan.store, "tiny").parts[name] == (node.path, node.end_step)
        commit(session.runner.plan, node)
        self.made.append((node.path, node.end_step))
        state = SimpleNamespace(is_completed=lambda: True)
        future = {"state": state, "wait": lambda: None, "add_done_callback": lambda call: call(None)}
        return SimpleNamespace(name=name, **future)


def commit(plan: Plan, node: Node) -> None:
    if Artifact(plan.store, node.path, node.end_step).complete:
        return
    job = job_of(plan, node)
    inputs = {
        role: ref.model_copy(update={"path": plan.graph.nodes[node.inputs[role].node or ""].path})
        for role, ref in job.inputs.items()
        if node.inputs[role].node
    }
    attempt = Attempt(job.model_copy(update={"inputs": job.inputs | inputs}), plan.store)
    attempt.begin()
    if (step := node.end_step) is not None:
        plan.store.write_once(f"{attempt.folder(Attempt.checkpoint_folder(step))}/weights", b"w")
        facts = (
            {"validation": {"corpus/notes": LOSSES[step]}, "validation_step": step}
            if node.stage == "pretrain"
            else {}
        )
        attempt.commit_checkpoint(step, facts, files=sealed(attempt, step))
    tokens = {"train": {"tokens": 40_000}} if node.kind == "corpus" else {}
    attempt.commit(metrics={"perplexity": 10.0, "chosen": CHOSEN} | tokens, step=node.end_step)


@pytest.fixture
def walked(tmp_path: Path, store: Store, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Parts]:
    """`walked("evaluate")`: walks the recipe until that part, which is interrupted."""

    def run(stop: str = "", recipe_text: str = RECIPE) -> Parts:
        recipe, parts = load(write_recipe(tmp_path, recipe_text)), Parts(stop)
        monkeypatch.setattr(pipeline, "run_part", parts)
        session = Session(Run(make(recipe, store), Notes(), Profile()), set(recipe.stages))
        session.runner.prepare()
        walk(session)
        return parts

    return run


def test_all_that_a_run_made_is_named_and_nothing_of_it_is_collected(
    walked: Callable[..., Parts], tmp_path: Path, store: Store
) -> None:
    made = walked().made
    assert survey(store, grace=0.0, now=time.time() + 86_400).items == []
    assert set(made) == set(runs.last(store, "tiny").parts.values())
    plan = make(load(write_recipe(tmp_path, RECIPE)), store)
    nodes = plan.graph.nodes
    assert {step.action for step in plan.steps.values()} == {"reuse"}
    for name, parent in {"cooldown": BEST, "longer": BEST, "export": ("longer", 7)}.items():
        assert parent in [(read.node, read.step) for read in nodes[name].inputs.values()]
    referred = {
        name: referred_steps(store, node.path)
        for name, node in nodes.items()
        if store.names(f"{node.path}/references")
    }
    assert referred == {"pretrain/1": {8}, "pretrain/2": {12}, "cooldown": {6}, "longer": {7}}


def test_an_interrupted_run_has_named_what_it_made_and_referred_to_what_is_known(
    walked: Callable[..., Parts], store: Store
) -> None:
    with pytest.raises(KeyboardInterrupt):
        walked("pretrain/3")
    # nobody refers to what is not known yet
    assert [kind for kind in ("cooldown", "select") if store.names(kind)] == []
    with pytest.raises(KeyboardInterrupt):
        walked("evaluate")
    [cooldown] = {path for path in store.names("cooldown") if Artifact(store, f"cooldown/{path}", 6).complete}
    assert runs.last(store, "tiny").parts["cooldown"] == (f"cooldown/{cooldown}", 6)
    assert survey(store, grace=0.0, now=time.time() + 86_400).items == []


def test_a_stage_that_is_cut_otherwise_once_the_best_step_is_known_runs_in_its_new_parts(
    walked: Callable[..., Parts], store: Store
) -> None:
    """From the last step, which stands in for the best one, the parent has nothing left to do."""
    rest = """\
  again: {{kind: cooldown, from: pretrain@best:val_loss, mixture: main, global_batch_size: rest of parent,
    budget: 6 steps, validation: {{interval: 0}}}}
"""
    made = walked(recipe_text=RECIPE + rest).made
    parts = runs.last(store, "tiny").parts
    assert [name for name in parts if name.startswith("again")] == ["again/1", "again/2"]
    assert set(made) == set(parts.values())
