"""Artifacts as stages would store them, made in the test: rows of training, metrics, files, and stages of
kinds that are not there yet."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

from flows.planning.graph import Input, Node
from flows.planning.plan import Plan, decide
from infra.store import Attempt
from specs.base import Spec, identity
from specs.launch import Launch
from specs.stages.base import Stage
from tests.flows.conftest import finish, job_of
from tests.infra.sealed import sealed

TRAINED = ("pretrain/1", "pretrain/2", "pretrain/3")


class AnyStage(Stage):
    """A stage of any kind."""

    VERSION: ClassVar[int] = 1


class AnyPart(Spec):
    """A part of any kind."""

    name: str = identity()


def add(
    plan: Plan,
    name: str,
    kind: str,
    reads: dict[str, tuple[str, int | None]],
    *,
    steps: int | None = None,
    tokens: int = 0,
) -> None:
    """Adds a part, and its stage where it is new. `reads`: role -> (part, step); `tokens`: of all steps."""
    stage = name.split("/")[0]
    plan.pipeline.stages.setdefault(stage, AnyStage(kind=kind))
    inputs = {}
    for role, (parent, step) in reads.items():
        node = plan.graph.nodes[parent]
        inputs[role] = Input(node.kind, node.fingerprint, node.name, node.name, step)
    part = AnyPart(name=name)
    plan.graph.nodes[name] = Node(name, stage, kind, 1, part, inputs, Launch(), end_step=steps, tokens=tokens)
    plan.steps[name] = decide(plan.graph.nodes[name], plan)


def store(
    plan: Plan,
    name: str,
    *,
    metrics: dict[str, Any] | None = None,
    rows: Iterable[dict[str, Any]] = (),
    facts: dict[str, Any] | None = None,
    files: dict[str, Any] | None = None,
    until: int | None = None,
) -> None:
    """Commits a part with what it recorded; one of training up to step `until`, its end by default."""
    node = plan.graph.nodes[name]
    attempt = Attempt(job_of(plan, node), plan.store)
    attempt.begin()
    for file, document in (files or {}).items():
        attempt.write_json(file, document)
    if node.end_step is None:
        attempt.commit(metrics=metrics or {})
    else:
        for row in rows:
            attempt.add_metrics(row)
        step = until or node.end_step
        plan.store.write_once(f"{attempt.folder(Attempt.checkpoint_folder(step))}/weights", b"weights")
        attempt.commit_checkpoint(step, facts or {}, files=sealed(attempt, step))
        if step == node.end_step:
            attempt.commit(metrics=metrics or facts or {}, step=step)
    plan.steps[name] = decide(node, plan)


def rows_of(plan: Plan, name: str, until: int | None = None, **columns: float) -> list[dict[str, Any]]:
    """A row for each step of a segment, with the tokens of its stage."""
    node = plan.graph.nodes[name]
    begin = node.segment.start_tokens if node.segment is not None else 0
    steps = range((node.start_step or 0) + 1, (until or node.end_step or 0) + 1)
    values = {
        "loss": 4.0,
        "lr": 0.01,
        "grad_norm": 1.0,
        "masked_share": 0.02,
        "tokens_per_second": 100.0,
    } | columns
    return [{"step": step, "tokens": begin + node.tokens_until(step), "time": 1.0} | values for step in steps]


def trained(plan: Plan) -> Plan:
    """Everything is finished; pretraining and cooldown have rows."""
    for name in (*TRAINED, "cooldown"):
        store(
            plan,
            name,
            rows=rows_of(plan, name),
            facts={"loss": 4.0, "tokens": 1, "epochs": {"corpus/notes": 0.5}, "passes": {}},
        )
    finish(plan, *(name for name in plan.graph.nodes if name not in (*TRAINED, "cooldown")))
    plan.steps.update({name: decide(node, plan) for name, node in plan.graph.nodes.items()})
    return plan
