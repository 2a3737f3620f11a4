"""The Prefect flow: walks a plan, a task run for every part.

Prefect owns order, retries, cancellation, logs and the page people look at. It never decides what is cached: a task asks the store first.
Runs in this process without a server, or against the one that `PREFECT_API_URL` names; `prefect.yaml` deploys it.

Invariants: a part starts when all that it reads, and all stages it comes after, have finished. A failure stops what depends on
it and nothing else. Whatever ends the flow, its stages are told to stop, and it waits for them.
"""

from __future__ import annotations

import os
import re
from contextvars import ContextVar
from queue import Empty, SimpleQueue
from typing import Any

from prefect import flow, get_run_logger, task
from prefect.artifacts import create_table_artifact
from prefect.cache_policies import NO_CACHE
from prefect.states import Completed
from prefect.task_runners import ThreadPoolTaskRunner

from flows.plan import Plan, Step, make
from flows.runner import Observer, Runner, StageFailed
from flows.selection import select
from infra.store import Artifact, Store
from specs.base import flatten
from specs.pipeline import load

STOPPED_BY = {"KeyboardInterrupt": "Ctrl-C", "TerminationSignal": "SIGTERM or a cancellation"}
ENDLESS = 10**6  # threads of the task runner; the walk itself limits what runs at the same time


class PipelineFailed(RuntimeError):
    """At least one stage did not finish. The message lists each with its reason."""


class PipelineInterrupted(KeyboardInterrupt):
    """A stage was stopped from outside, so the run ends as if it had been."""


class _Silent:
    """An observer for runs without a terminal: Prefect's logs say it all."""

    def begin(self, step: Step) -> None: ...
    def line(self, name: str, text: str) -> None: ...
    def note(self, name: str, text: str) -> None: ...
    def progress(self, name: str, row: dict[str, Any]) -> None: ...
    def end(self, step: Step, outcome: str, seconds: float, metrics: dict[str, Any] | None) -> None: ...


_observer: ContextVar[Observer] = ContextVar("observer")  # the terminal of `apertus run`; not set: nobody watches


class _Logged:
    """Sends a stage's lines to the log of its task run as well."""

    def __init__(self, inner: Observer) -> None:
        self.inner = inner
        self.loggers: dict[str, Any] = {}

    def begin(self, step: Step) -> None:
        self.inner.begin(step)

    def line(self, name: str, text: str) -> None:
        if name in self.loggers:
            self.loggers[name].info(text)
        self.inner.line(name, text)

    def note(self, name: str, text: str) -> None:
        if name in self.loggers:
            self.loggers[name].warning(text)
        self.inner.note(name, text)

    def progress(self, name: str, row: dict[str, Any]) -> None:
        self.inner.progress(name, row)

    def end(self, step: Step, outcome: str, seconds: float, metrics: dict[str, Any] | None) -> None:
        self.inner.end(step, outcome, seconds, metrics)


class Session:
    """One run of a plan: what the tasks share. A plain class, so that Prefect does not look into it."""

    def __init__(self, plan: Plan, observer: Observer, chosen: set[str]) -> None:
        self.plan = plan
        self.chosen = chosen
        self.observer = _Logged(observer)
        self.runner = Runner(plan, self.observer)

    def needs(self, name: str) -> set[str]:
        """Parts that have to be finished before a part. Of two that are the same work, the second waits, and finds it finished."""
        graph = self.plan.graph
        node = graph.nodes[name]
        twin = graph.twin(node)
        same = {twin} if twin is not None and graph.nodes[twin].stage in self.chosen else set()
        return {*graph.parents(node), *same, *(other.name for stage in graph.after[node.stage] for other in graph.of(stage))}


def _worth_another_try(task_: Any, run: Any, state: Any) -> bool:
    try:
        state.result()
    except StageFailed as error:
        return error.again
    except Exception as error:
        return isinstance(error, OSError)
    return False


@task(task_run_name="{name}", cache_policy=NO_CACHE, persist_result=False)
def run_part(name: str, session: Session) -> Any:
    """Runs one part, or finds it finished (state *Cached*)."""
    logger = get_run_logger()
    session.observer.loggers[name] = logger
    before = session.plan.steps[name]
    logger.info("%s: %s", before.action, before.reason)
    step = session.runner.run(name)
    _publish(step, session.plan)
    if before.action == "reuse":
        return Completed(name="Cached", message=f"finished before: {step.node.path}")
    return step.node.path


def _publish(step: Step, plan: Plan) -> None:
    """The results of a part as a table on Prefect's page."""
    manifest = Artifact(plan.store, step.node.path, step.node.end_step).manifest
    values = flatten({**manifest["metrics"], "seconds": manifest["seconds"]})
    rows = [{"metric": name, "value": f"{value:.6g}" if isinstance(value, float) else str(value)} for name, value in values.items()]
    key = re.sub(r"[^a-z0-9]+", "-", f"{plan.pipeline.name}-{step.node.name}".lower()).strip("-")
    create_table_artifact(key=key, table=rows, description=f"{step.node.name}: {step.node.path}")


def walk(session: Session) -> None:
    """Submits every chosen part when it is ready, as many at a time as the recipe allows. PipelineFailed when one did not finish."""
    plan, runner = session.plan, session.runner
    retries = plan.pipeline.retries
    delays: list[float] = [retries.backoff.seconds * 2**attempt for attempt in range(retries.attempts)]
    part = run_part.with_options(retries=retries.attempts, retry_delay_seconds=delays, retry_condition_fn=_worth_another_try)
    waiting = [name for name, node in plan.graph.nodes.items() if node.stage in session.chosen]
    finished: set[str] = {name for name in plan.graph.nodes if name not in waiting}
    failed: dict[str, str] = {}
    running: dict[str, Any] = {}
    over: SimpleQueue[str] = SimpleQueue()
    try:
        while waiting or running:
            for name in [name for name in waiting if session.needs(name) & failed.keys()]:
                waiting.remove(name)
                failed[name] = f"not run, since {', '.join(sorted(session.needs(name) & failed.keys()))} did not finish"
            for name in [name for name in waiting if session.needs(name) <= finished]:
                if len(running) < plan.pipeline.concurrency:
                    waiting.remove(name)
                    running[name] = part.submit(name, session)
                    running[name].add_done_callback(lambda _, name=name: over.put(name))
            try:
                name = over.get(timeout=0.5)
            except Empty:
                continue
            future = running.pop(name)
            future.wait()
            state = future.state
            if state.is_completed():
                finished.add(name)
                _check_again(session)
            else:
                failed[name] = _reason(state)
    except BaseException as error:
        runner.stop(f"the run was stopped by {STOPPED_BY.get(type(error).__name__, repr(error))}")
        for future in running.values():
            future.wait()
        raise
    if runner.stopping:
        raise PipelineInterrupted(runner.stopping)
    if failed:
        raise PipelineFailed("\n".join(f"{name}: {reason.removeprefix(f'{name}: ')}" for name, reason in failed.items()))


def _check_again(session: Session) -> None:
    """Plans again after every part: a corpus that turned out too small is refused before anything trains on it, and what `@best:` means is
    known when its stage has finished."""
    session.plan = session.runner.plan = make(session.plan.pipeline, session.plan.store)


def _reason(state: Any) -> str:
    try:
        state.result()
    except BaseException as error:
        return str(error) or type(error).__name__
    return str(state.message)


def run_plan(plan: Plan, observer: Observer, until: str | None, only: str | None) -> None:
    """Runs what a plan asks for, inside a flow run."""
    session = Session(plan, observer, select(plan, until, only))
    session.runner.prepare()
    walk(session)


@flow(name="apertus", validate_parameters=True, task_runner=ThreadPoolTaskRunner(max_workers=ENDLESS), persist_result=False)  # type: ignore[arg-type]
def pipeline(
    spec: str, overrides: list[str] | None = None, until: str | None = None, only: str | None = None, store: str | None = None
) -> None:
    """Runs a recipe. `spec`: path of the YAML file. `overrides`: as --set. `until`, `only`: a stage. `store`: wins over the recipe's."""
    recipe = load(spec, overrides or [])
    plan = make(recipe, Store.open(store or os.environ.get("APERTUS_STORE") or recipe.store))
    run_plan(plan, _observer.get(_Silent()), until, only)


def run_here(observer: Observer, **parameters: Any) -> None:
    """Calls the flow in this process, watched by `observer`. PipelineFailed when a stage did not finish."""
    token = _observer.set(observer)
    try:
        pipeline(**parameters)
    finally:
        _observer.reset(token)
