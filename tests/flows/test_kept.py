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
AGAIN = """\
  again: {{kind: cooldown, from: pretrain@best:val_loss, mixture: main, global_batch_size: rest of parent,
    budget: 6 steps, validation: {{interval: 0}}}}
"""


class Parts:
    """In place of the task: a part is committed in the moment in which it is submitted, to the checkpoints
    that it names. Until `stop`. Those with `late` in their names end with the part `chosen`."""

    def __init__(self, stop: str = "", late: str = "//") -> None:
        self.stop, self.late = stop, late
        self.held: list[Callable[[None], None]] = []
        self.made: list[tuple[str, int | None]] = []

    def with_options(self, **_: Any) -> Parts:
        return self

    def submit(self, name: str, session: Session, *, wait_for: list[Any], return_state: bool) -> Any:
        node = session.begun[name].node
        assert {future.name for future in wait_for} == session.needs()[name]
        if name == self.stop:
            raise KeyboardInterrupt
        # before it is made
        assert runs.last(session.plan.store, "tiny").parts[name] == (node.path, node.end_step)
        commit(session.runner.plan, node)
        self.made.append((node.path, node.end_step))
        state = SimpleNamespace(is_completed=lambda: True)
        future = SimpleNamespace(name=name, state=state, wait=lambda: None, add_done_callback=self.call)
        if self.late in name:
            future.add_done_callback = self.held.append
        elif name == "chosen":
            future.add_done_callback = lambda call: [done(None) for done in (call, *self.held)]
        return future

    @staticmethod
    def call(done: Callable[[None], None]) -> None:
        done(None)


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
    shares = dict.fromkeys(("share/padding", "share/cropped", "share/cropped_by_windows"), 0.0)
    metrics = {"perplexity": 10.0, "chosen": CHOSEN, "rows": 1} | shares  # the latter of best-fit packing
    attempt.commit(metrics=metrics | tokens, step=node.end_step)


@pytest.fixture
def walked(tmp_path: Path, store: Store, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Parts]:
    """`walked("evaluate")`: walks the recipe until that part, which is interrupted."""

    def run(stop: str = "", recipe_text: str = RECIPE, late: str = "//") -> Parts:
        recipe, parts = load(write_recipe(tmp_path, recipe_text)), Parts(stop, late)
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
    made = walked(recipe_text=RECIPE + AGAIN).made
    parts = runs.last(store, "tiny").parts
    assert [name for name in parts if name.startswith("again")] == ["again/1", "again/2"]
    assert set(made) == set(parts.values())


def test_a_part_that_began_with_other_inputs_is_made_again(
    walked: Callable[..., Parts], store: Store
) -> None:
    """`fresh` skips what `again` has drawn; when it begins, the best step of that one's parent is unknown."""
    fresh = """\
  rest: {{kind: mixture, weights: {{corpus/notes: 1}}, max_repetition: 100, exclude: [again]}}
  fresh: {{kind: pretrain, mixture: rest, sequence_length: 32, global_batch_size: 4, budget: 4 steps,
    model: {{dim: 32, n_layers: 2, n_heads: 2, n_kv_heads: 1, head_dim: 16, ffn_dim: 64, vocab_size: 512}},
    optimizer: {{lr: 1e-2}}, schedule: {{warmup: 1 steps}}, precision: {{param: float32}}}}
  after: {{kind: export, from: fresh}}
"""
    made = [path for path, _ in walked(recipe_text=RECIPE + AGAIN + fresh).made]
    parts = runs.last(store, "tiny").parts
    before = {parts[f"pretrain/{number}"][0] for number in (1, 2, 3)}
    others = [path for path in made if path.startswith("pretrain/") and path not in before]
    assert len(others) == 2 and others[1] == parts["fresh"][0] and parts["after"][0] in made


def test_a_part_that_is_needed_no_more_ends_without_a_word(
    walked: Callable[..., Parts], store: Store
) -> None:
    """The rows for the length of the first candidate, which stands in for the chosen one."""
    packed = """\
  packed: {{kind: cooldown, from: chosen, mixture: main, packing: best-fit, budget: 4 steps,
    validation: {{interval: 0}}}}
"""
    longer = RECIPE.replace("budget: 7 steps,", "budget: 7 steps, sequence_length: 64, global_batch_size: 4,")
    recipe = longer.replace("stages:", "concurrency: 2\nstages:", 1) + packed
    made = walked(recipe_text=recipe, late="packing-32").made
    parts = runs.last(store, "tiny").parts
    assert "packed/packing-64/corpus/notes" in parts and "packed/packing-32/corpus/notes" not in parts
    assert set(parts.values()) < set(made)  # and the rows that nobody reads
