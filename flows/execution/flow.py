"""The Prefect flow: runs a plan, with a task run for every part.

Prefect runs the tasks, retries them by a condition, is told by `wait_for` which parts a part reads, and shows
states, logs and pages. It decides neither what is cached, since a task looks into the store first, nor the
number of attempts, since the runner knows what was committed meanwhile. Nor does it decide when a part
starts: the plan is made again between two parts, so the walk submits a part when all that it reads has
finished and been planned with. In Prefect's task runner, the next part would start by the plan before.

The flow runs in this process, without a server or with that of `PREFECT_API_URL`; `prefect.yaml` deploys it.

Invariants: a part starts when all of the run that it reads, or names under `after`, has finished; one that a
later plan gives other inputs is made again. A failure stops only parts that depend on it. However the flow
ends, its stages are told to stop, and it waits for them. Its state is Cancelled when a person has stopped it
(a cancellation, Ctrl-C), and Crashed when anything else has.
"""

import itertools
import logging
import os
import subprocess
import sys
import time
from collections.abc import Container, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import PurePath
from queue import Empty, SimpleQueue
from typing import Any

from prefect import flow, get_run_logger, runtime, tags, task
from prefect.cache_policies import NO_CACHE
from prefect.exceptions import CancelledRun
from prefect.settings import get_current_settings
from prefect.states import Cancelled, Completed, Crashed, State
from prefect.task_runners import ThreadPoolTaskRunner

from flows.execution import interrupts
from flows.execution.cluster_check import cluster_notes
from flows.execution.parameters import Override, RecipeFile, StageName, StoreUrl
from flows.execution.prefect_pages import ProgressBar, only_shown, publish_results, publish_run
from flows.execution.runner import Observer, PipelineFailed, Runner, StageFailed
from flows.execution.watchdog import guard
from flows.format import describe
from flows.inspection.sources import check_sources
from flows.planning.plan import Plan, Step, decide, make
from flows.planning.run_records import Records
from flows.planning.stage_choice import select
from flows.report import render
from infra.store import Store, StoreError
from infra.store.documents import Outcome, RunEnd
from specs.job import ProgressRow
from specs.profiles import Profile, load_profile
from specs.recipe import load
from specs.redaction import RedactedRecord, redacted, without_secrets

STOPPED_BY = {
    "KeyboardInterrupt": interrupts.CTRL_C,
    "TerminationSignal": "SIGTERM or a cancellation",
    "WorkerLost": "the end of its worker",
}
# threads of the task runner, which the walk limits, and retries of a part, which the runner limits
ENDLESS = 10**6


class DeploymentWorkerLost(RuntimeError):
    """The worker that started a deployed run is gone, so a cancellation would not arrive."""


class PipelineInterrupted(KeyboardInterrupt):
    """A stage was stopped from outside, which ends the run as well."""


@dataclass
class Run:
    """A plan to run, its observer, and the profile of its cluster."""

    plan: Plan
    observer: Observer
    profile: Profile
    guard: subprocess.Popen[bytes] | None = None  # see `watchdog`


_run: ContextVar[Run] = ContextVar("run")  # the run of `apertus run`; not set in a deployed run


class _Logged(Observer):
    """An observer that also sends a stage's lines to the log of its task run."""

    def __init__(self, inner: Observer) -> None:
        self.inner = inner
        self.loggers: dict[str, Any] = {}
        self.bars: dict[str, ProgressBar] = {}

    def begin(self, step: Step) -> None:
        self.inner.begin(step)

    def line(self, name: str, text: str) -> None:
        if name in self.loggers:
            self.loggers[name].info(text)
        self.inner.line(name, text)

    def note(self, name: str, text: str) -> None:
        text = redacted(text)
        if name in self.loggers:
            self.loggers[name].warning(text)
        self.inner.note(name, text)

    def progress(self, name: str, row: ProgressRow) -> None:
        if name in self.bars:
            self.bars[name].update(row, f"{name}: {describe(row)}")
        self.inner.progress(name, row)

    def end(self, step: Step, outcome: str, seconds: float, metrics: dict[str, Any] | None) -> None:
        self.inner.end(step, redacted(outcome), seconds, metrics)


class Session:
    """The state that the tasks of one run share. A plain class, so that Prefect does not inspect it."""

    def __init__(self, run: Run, chosen: set[str]) -> None:
        self.plan = run.plan
        self.chosen = chosen
        self.observer = _Logged(run.observer)
        self.runner = Runner(run.plan, self.observer, profile=run.profile)
        self.worker = os.getppid() if runtime.deployment.id is not None else None
        # by name of the part; a plan that is made later may have another part of this name
        self.begun: dict[str, Step] = {}

    def needs(self, without: Container[str] = ()) -> dict[str, set[str]]:
        """The parts of the run, `without` some of them, each with the parts of the run that must finish
        before it. A duplicate waits for the part that does its work."""
        graph = self.plan.graph
        chosen = {name for name, node in graph.nodes.items() if node.stage in self.chosen}
        needs = {}
        for name, node in graph.nodes.items():
            if name in chosen and name not in without:
                before = {other.name for stage in graph.after[node.stage] for other in graph.of(stage)}
                work = {graph.duplicates[name]} if name in graph.duplicates else set[str]()
                needs[name] = chosen & {*graph.parents(node), *before, *work}
        return needs

    def planned(self, name: str) -> bool:
        """Whether the plan still has the part that was begun under this name."""
        node, begun = self.plan.graph.nodes.get(name), self.begun[name].node
        return node is not None and (node.path, node.end_step) == (begun.path, begun.end_step)


def _worth_another_try(task_: Any, run: Any, state: Any) -> bool:
    error = state.result(raise_on_failure=False)
    return isinstance(error, StageFailed) and error.again


@task(task_run_name="{name}", cache_policy=NO_CACHE, persist_result=False)
def run_part(name: str, session: Session) -> Any:
    """Runs one part, or finds it finished (state *Cached*)."""
    logger = get_run_logger()
    session.observer.loggers[name] = logger
    before = session.begun[name]
    logger.info("%s: %s", before.action, before.reason)
    if before.action != "reuse":
        session.observer.bars[name] = ProgressBar(session.plan.pipeline.name, name)
    with _secrets_kept():
        step = session.runner.run(before.node)
        publish_results(step, session.plan)
    if name in session.observer.bars:
        session.observer.bars.pop(name).finish()
    if before.action == "reuse":
        return Completed(name="Cached", message=f"finished before: {step.node.path}")
    return step.node.path


@contextmanager
def _secrets_kept() -> Iterator[None]:
    """Replaces an error that holds a secret, since Prefect stores the messages of errors and their causes."""
    try:
        yield
    except Exception as error:
        shown = without_secrets(error)
        if shown is error:
            raise
        raise shown from None


def walk(session: Session) -> None:
    """Submits chosen parts when ready, up to the recipe's concurrency. PipelineFailed if one fails."""
    concurrency, runner = session.plan.pipeline.concurrency, session.runner
    part = run_part.with_options(retries=ENDLESS, retry_condition_fn=_worth_another_try)
    waiting = session.needs()
    finished: set[str] = set()
    failed: dict[str, str] = {}
    futures: dict[str, Any] = {}
    running: set[str] = set()
    over: SimpleQueue[str] = SimpleQueue()

    def begin() -> None:
        """Starts the parts that are ready, as far as there is room."""
        for name, needed in list(waiting.items()):
            if lost := needed & failed.keys():
                del waiting[name]
                failed[name] = f"not run, since {', '.join(sorted(lost))} did not finish"
            elif needed <= finished and len(running) < concurrency:
                del waiting[name]
                session.begun[name] = session.plan.steps[name]
                inputs = [futures[other] for other in needed]
                futures[name] = part.submit(name, session, wait_for=inputs, return_state=False)
                running.add(name)
                futures[name].add_done_callback(lambda _, name=name: over.put(name))

    try:
        while waiting or running:
            interrupts.check()
            begin()
            if session.worker is not None and os.getppid() != session.worker:
                raise DeploymentWorkerLost(
                    "the worker that started this run is gone; the next run resumes its work"
                )
            try:
                name = over.get(timeout=0.5)
            except Empty:
                continue
            running.remove(name)
            futures[name].wait()
            state = futures[name].state
            before = session.plan
            if state.is_completed():
                begin()  # others, while this thread plans again; those that read this one come after it
                finished.add(name)
                _settle(session, name)
            elif session.planned(name):
                failed[name] = _reason(state)
            if session.plan is not before or not session.planned(name):
                for other in [*futures.keys() - running]:
                    if not session.planned(other):  # it has other inputs now, or other parts took its place
                        finished.discard(other)
                        del futures[other]
                waiting = session.needs(without=futures.keys() | failed.keys())
    except BaseException as error:
        cause = str(error) if isinstance(error, KeyboardInterrupt) else ""
        runner.stop(f"the run was stopped by {cause or STOPPED_BY.get(type(error).__name__, repr(error))}")
        for name in running:
            futures[name].wait()
        raise
    if runner.stopping:
        raise PipelineInterrupted(runner.stopping)
    if failed:
        raise PipelineFailed(failed)


def _settle(session: Session, finished: str) -> None:
    """Plans again after a part on which the plan of others depends: a corpus that is too small is refused
    before anything trains on it, and `@best:` is known when its stage has finished. It retries while storage
    is unavailable, as for a part; other parts continue meanwhile."""
    pipeline, retries = session.plan.pipeline, session.plan.pipeline.retries
    node = session.begun[finished].node
    for before in itertools.count():
        try:
            if not session.plan.graph.plan_depends_on(node, pipeline):
                if session.planned(finished):
                    session.plan.steps[finished] = decide(node, session.plan)
                return
            plan = make(pipeline, session.plan.store)
            session.runner.adopt(plan)
            session.plan = plan
            return
        except OSError as error:
            if before >= retries.attempts:
                raise
            wait = retries.wait(before)
            message = f"the next parts could not be planned: {error}; the next try begins in {wait:g} s"
            session.observer.note(finished, message)
            time.sleep(wait)


def _reason(state: Any) -> str:
    try:
        state.result()
    except BaseException as error:
        return str(error) or type(error).__name__
    return str(state.message)


def run_plan(run: Run, until: str | None, only: str | None) -> None:
    """Runs the unfinished parts of a plan, inside a flow run. Sets `run.plan` to the plan after the run."""
    session = Session(run, select(run.plan, until, only, profile=run.profile))
    session.runner.prepare()
    try:
        with _recorded(session, f"--until {until}" if until else f"--only {only}" if only else ""):
            walk(session)
    except PipelineFailed as error:
        _publish(session.plan, error.reasons)
        raise
    finally:
        run.plan = session.plan
    _publish(session.plan, {})


@contextmanager
def _recorded(session: Session, asked: str) -> Iterator[None]:
    """Records how the run ended. `asked`: what a run was asked for that does not run everything."""
    started, begun, reason = datetime.now(UTC).isoformat(timespec="seconds"), time.monotonic(), asked
    outcome: Outcome = "finished"
    unfinished: list[str] = []
    try:
        yield
    except BaseException as error:
        stopped = isinstance(error, DeploymentWorkerLost) or not isinstance(error, Exception)
        outcome = "interrupted" if stopped else "failed"
        reason = redacted(str(error) or STOPPED_BY.get(type(error).__name__, type(error).__name__))
        unfinished = [*error.reasons] if isinstance(error, PipelineFailed) else []
        raise
    finally:
        plan, seconds = session.plan, round(time.monotonic() - begun, 1)
        end = RunEnd(outcome=outcome, reason=reason, unfinished=unfinished, started=started, seconds=seconds)
        with suppress(OSError, StoreError):  # a run without the record of its end is listed as such
            Records(plan.store, plan.pipeline.name).write(plan.graph, plan.pipeline.to_json(), end)


def _publish(plan: Plan, failed: dict[str, str]) -> None:
    """Stores the report of a deployed run, and links to it on Prefect's pages."""
    if runtime.deployment.id is None:
        return
    with only_shown("the report"):
        # failed parts have gates and checkpoints that the plan of the run does not know
        plan = make(plan.pipeline, plan.store)
        path = f"reports/{plan.pipeline.name}/{runtime.flow_run.id}.html"
        plan.store.write_bytes(path, render(plan).encode())
        publish_run(plan, plan.store.location(path), failed)


def _run_name() -> str:
    """The name of a run on Prefect's pages: its recipe or deployment, and the first digits of its id."""
    if run := _run.get(None):
        name = run.plan.pipeline.name
    else:
        name = runtime.deployment.name or PurePath(runtime.flow_run.parameters["spec"]).stem
    return f"{name}-{str(runtime.flow_run.id)[:4]}"


@flow(
    name="apertus",
    flow_run_name=_run_name,
    validate_parameters=True,
    task_runner=ThreadPoolTaskRunner(max_workers=ENDLESS),  # type: ignore[arg-type]  # Prefect types it too narrowly
    persist_result=False,
)
def pipeline(
    spec: RecipeFile,
    overrides: list[Override] | None = None,
    until: StageName | None = None,
    only: StageName | None = None,
    store: StoreUrl | None = None,
) -> State[None] | None:
    """Runs the unfinished parts of a recipe, in order.

    Args:
        spec: YAML file of the recipe, on the worker's machine; relative to the checkout.
        overrides: fields to change, as with --set: stages.sft.optimizer.lr=2e-6
        until: run this stage and its inputs; everything by default.
        only: run only this stage; its inputs must be finished.
        store: folder or fsspec URL, without credentials; that of the recipe by default.
    """
    logging.setLogRecordFactory(RedactedRecord)
    run = _run.get(None)
    if get_current_settings().api.url is not None:  # this server outlives the run
        started = guard(str(runtime.flow_run.id))
        if run is not None:
            run.guard = started
    interrupts.listen_again()  # Prefect has taken SIGTERM; its exception may be raised twice
    with _secrets_kept():
        if run is None:
            recipe = load(spec, overrides or [])
            plan = make(recipe, Store.open(store or os.environ.get("APERTUS_STORE") or recipe.store))
            check_sources(plan)
            run = Run(plan, Observer(), load_profile(os.environ.get("APERTUS_PROFILE")))
            for note in cluster_notes(plan, run.profile, select(plan, until, only, profile=run.profile)):
                get_run_logger().warning(note)
        try:
            run_plan(run, until, only)
        except DeploymentWorkerLost as error:
            return Crashed(message=str(error))
        except KeyboardInterrupt as error:
            if str(error) != interrupts.CTRL_C:  # nobody need have asked for another signal
                raise
            return Cancelled(message="stopped by Ctrl-C; the next run resumes its work")
        return None


def run_here(plan: Plan, observer: Observer, profile: Profile, **parameters: Any) -> Plan:
    """Runs a plan with the flow in this process; returns the plan after the run. `parameters`: of the flow,
    for Prefect's pages. PipelineFailed when a stage did not finish."""
    run = Run(plan, observer, profile)
    token = _run.set(run)
    try:
        with tags(plan.pipeline.name):
            pipeline(**parameters)
    except CancelledRun:
        interrupts.check()
        raise
    finally:
        _run.reset(token)
        if run.guard is not None and isinstance(sys.exception(), PipelineFailed | None):
            run.guard.kill()  # the end has been reported
    return run.plan
