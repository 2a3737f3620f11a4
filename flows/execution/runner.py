"""Runs one part: makes the job, starts its process, and judges the outcome by the store.

Invariant: a part is finished when its manifest is in the store, whatever its process returned. Nothing is
started while the runner is stopping. A run that works on a part holds its lease; another run waits for it,
and reuses the result, or takes over when the holder ends without one.
"""

import contextlib
import threading
import time
import uuid
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from fsspec.implementations.memory import MemoryFileSystem

from flows.planning.graph import Input, Node
from flows.planning.plan import Plan, Step, decide
from flows.planning.run_records import Records
from infra.launchers import REFUSED, Ended, Launched, launch_job
from infra.store import Artifact, StoreError
from infra.store.inputs import lock
from infra.store.scratch import temporary_folder
from infra.store.writing.lease import Lease, LeaseLost, Leases, Timing
from infra.store.writing.retention import hold, refer
from specs.job import DamagedInput, InputRef, Job, ProgressRow
from specs.profiles import Profile

JOBS_IN_VAIN = 3
REFUSALS = 100  # in a row, by a cluster that accepted jobs of this run before; they take most of a day


class StageFailed(RuntimeError):
    """A part without a manifest. `again`: another attempt may succeed; `refused`: by the cluster."""

    def __init__(self, message: str, *, again: bool, refused: bool = False) -> None:
        super().__init__(message)
        self.again = again
        self.refused = refused


class PipelineFailed(RuntimeError):
    """At least one part did not finish. The message lists each with its reason."""

    def __init__(self, reasons: dict[str, str]) -> None:
        lines = (f"{name}: {reason.removeprefix(f'{name}: ')}" for name, reason in reasons.items())
        super().__init__("\n".join(lines))
        self.reasons = reasons


class GateFailed(RuntimeError):
    """A finished evaluation that does not meet a bound of the recipe."""


class Interrupted(RuntimeError):
    """The part was stopped from outside; the next run resumes from what it has committed."""


class Observer:
    """Receives the events of a run. Subclasses show them in a terminal or in Prefect's logs."""

    def begin(self, step: Step) -> None: ...
    def line(self, name: str, text: str) -> None: ...
    def note(self, name: str, text: str) -> None: ...
    def progress(self, name: str, row: ProgressRow) -> None: ...
    def end(self, step: Step, outcome: str, seconds: float, metrics: dict[str, Any] | None) -> None: ...


class Runner:
    """Runs the parts of one plan. Safe to call, and to stop, from several threads."""

    def __init__(
        self, plan: Plan, observer: Observer, timing: Timing | None = None, profile: Profile | None = None
    ) -> None:
        self.plan = plan
        self.profile = profile or Profile()
        self.observer = observer
        self.timing = timing or Timing()
        self.stopping = ""
        self._stopped = threading.Event()
        self._processes: set[Launched] = set()
        self._dead_nodes: set[str] = set()
        self._in_vain: dict[str, int] = {}  # by part: jobs in a row that a cluster ended before a commit
        self._failed: dict[str, int] = {}  # by part: attempts in a row that failed before a commit
        self._seen: dict[str, set[str]] = {}  # by part: what was committed before these attempts
        self._taken = False  # the cluster has accepted a job of this run
        self._lock = threading.Lock()

    def prepare(self) -> None:
        """Records the run and its sources. StoreError if other processes cannot see the store."""
        if isinstance(self.plan.store.fs, MemoryFileSystem):
            message = "is in the memory of this process, and stages are processes of their own"
            raise StoreError(f"the store {self.plan.store.url} {message}. Fix: name a folder or a bucket")
        with temporary_folder("check", self.profile.scratch):
            pass  # StageError before anything is written
        self.plan.store.initialise()
        _note_inputs(self.plan)
        Records(self.plan.store, self.plan.pipeline.name).write(self.plan.graph, self.plan.pipeline.to_json())

    def adopt(self, plan: Plan) -> None:
        """Continues with a new plan, in which `@best:` and selections have their results. The differences are
        recorded first: the last record always names everything that this run has made."""
        before, after = (
            (graph.best, [(node.path, node.end_step) for node in graph.nodes.values()])
            for graph in (self.plan.graph, plan.graph)
        )
        if before != after:
            _note_inputs(plan)
            Records(plan.store, plan.pipeline.name).keep(plan.graph, plan.pipeline.to_json())
        self.plan = plan

    def stop(self, reason: str) -> None:
        """Stops running parts, which may write a checkpoint, and starts no more."""
        with self._lock:
            self.stopping = self.stopping or reason
            self._stopped.set()
            running = list(self._processes)
        for process in running:
            process.stop(reason)

    def run(self, node: Node) -> Step:
        """Runs a part unless it is finished, and returns its step. After a StageFailed with `again`, the next
        call for the part waits first, as the recipe's `retries` say. May raise GateFailed or Interrupted."""
        name = node.name
        if failed := self._failed.get(name, 0):
            wait = self.plan.pipeline.retries.wait(failed - 1)
            if wait and not self.stopping:
                self.observer.note(name, f"the next attempt begins in {wait:g} s")
            self._stopped.wait(wait)
        try:
            return self._finish(node)
        except StageFailed as error:
            error.again = error.again and self._another(node, refused=error.refused)
            raise
        except OSError as error:
            raise StageFailed(f"{name}: {error}", again=self._another(node)) from error

    def _another(self, node: Node, *, refused: bool = False) -> bool:
        """Whether another attempt follows: the recipe limits failures in a row without a new commit."""
        gained: set[str] = set()
        with contextlib.suppress(OSError):
            committed = self._committed(node)
            gained = committed - self._seen.get(node.name, committed)
            self._seen[node.name] = committed
        failed = self._failed[node.name] = 1 if gained else self._failed.get(node.name, 0) + 1
        return failed <= (REFUSALS if refused and self._taken else self.plan.pipeline.retries.attempts)

    def _finish(self, node: Node) -> Step:
        name = node.name
        begun, outcome = time.monotonic(), "reused"
        while (lease := self._turn(node)) is not None:
            begun = time.monotonic()
            try:
                with lease:
                    step = decide(node, self.plan)
                    if step.action != "reuse":  # the last holder may have finished it meanwhile
                        self.observer.begin(step)
                        self._attempt(node, step, lease)
                        outcome = "finished"
            except LeaseLost as error:
                self.observer.note(name, f"{error}; the rest is left to it")
            except (StageFailed, Interrupted) as error:
                self.observer.end(step, str(error).splitlines()[0], time.monotonic() - begun, None)
                raise
        step = decide(node, self.plan)
        if step.action == "reuse" and self.plan.pipeline.stages[node.stage].protect:
            Records(self.plan.store, self.plan.pipeline.name).protect(node)
        metrics = node.artifact(self.plan.store).manifest.metrics if step.action == "reuse" else None
        if step.gate_failures:
            self.observer.end(step, step.gate_failures[0], time.monotonic() - begun, metrics)
            raise GateFailed("; ".join(step.gate_failures))
        self.observer.end(step, outcome, time.monotonic() - begun, metrics)
        return step

    def _turn(self, node: Node) -> Lease | None:
        """Waits for the lease of a part, unless told to stop; None when another run has finished the part."""
        artifact = node.artifact(self.plan.store)
        leases = Leases(self.plan.store, node.path, self.timing)
        noted = ""
        while not artifact.complete:
            if self.stopping:
                raise Interrupted(f"{node.name} was not started: {self.stopping}")
            seen = leases.look()
            if seen.free and (lease := leases.claim(attempt_id(), seen)) is not None:
                if seen.why:
                    self.observer.note(node.name, f"taken over from {seen.holder}: {seen.why}")
                return lease
            why = f" ({seen.why})" if seen.why else ""
            if not seen.free and noted != (noted := f"held by {seen.holder}{why}, waiting"):
                self.observer.note(node.name, noted)
            self._stopped.wait(self.timing.look)
        return None

    def _attempt(self, node: Node, step: Step, lease: Lease) -> None:
        """Runs one attempt until the part is finished, or a cluster ended the job, for the next to resume."""
        before = self._committed(node)
        self._seen.setdefault(node.name, before)
        with temporary_folder(node.name.replace("/", "-"), self.profile.scratch) as scratch:
            job = self._job(node, step, scratch, lease)
            process = self._process(job, node)
            with self._lock:
                self._processes.add(process)
                stopping = self.stopping
            if stopping:
                process.stop(stopping)
            lease.when_lost(process.stop)
            try:
                ended = process.run(
                    lambda text: self.observer.line(node.name, text),
                    lambda row: self.observer.progress(node.name, row),
                    lease.stage_started,
                )
            except REFUSED as error:
                raise StageFailed(f"{node.name}: {error}", again=True, refused=True) from error
            except BaseException:
                process.stop("the launcher failed")
                raise
            finally:
                with self._lock:
                    self._processes.discard(process)
            self._taken = True
            if ended.commits_for:
                self._let_commit(node, ended.commits_for)
            log = self._keep_log(job, scratch)
            if node.artifact(self.plan.store).complete:
                return
            if ended.requeue and not self.stopping:
                self._submit_again(node, ended, before, log)
            else:
                self._judge(node, ended, log, lease)

    def _process(self, job: Job, node: Node) -> Launched:
        return launch_job(
            job,
            job.launch,
            self.profile,
            distributed=node.part.ON_ENGINE,
            in_units=node.part.WORKERS > 0,
            exclude=sorted(self._dead_nodes),
        )

    def _committed(self, node: Node) -> set[str]:
        """The committed work that the next attempt does not repeat."""
        names = self.plan.store.names
        return {f"{of}/{name}" for of in ("checkpoints", "units") for name in names(f"{node.path}/{of}")}

    def _let_commit(self, node: Node, seconds: float) -> None:
        """Keeps the lease until a stage that nobody follows any more has committed, or must be over."""
        self.observer.note(node.name, f"waiting up to {seconds:g} s for the commit of its stage")
        before, until = self._committed(node), time.monotonic() + seconds
        while self._committed(node) == before and time.monotonic() < until:
            time.sleep(self.timing.look)

    def _submit_again(self, node: Node, ended: Ended, before: set[str], log: str) -> None:
        """Announces the next attempt. StageFailed when attempts make no progress."""
        self._dead_nodes |= {*ended.dead_nodes}
        in_vain = self._in_vain.get(node.name, 0) + 1 if self._committed(node) == before else 0
        self._in_vain[node.name] = in_vain
        if in_vain == JOBS_IN_VAIN:
            nothing = f"{in_vain} jobs in a row ended before anything was committed"
            fix = f"raise the time limit, or save checkpoints more often (log: {log})"
            message = f"{node.name}: {nothing}, the last because {ended.requeue}. Fix: {fix}"
            raise StageFailed(message, again=False)
        without = f", without {', '.join(sorted(self._dead_nodes))}" if self._dead_nodes else ""
        self.observer.note(node.name, f"submitted again{without}, because {ended.requeue}")

    def _judge(self, node: Node, ended: Ended, log: str, lease: Lease) -> None:
        """Raises an error that says why there is no result; returns if another attempt follows at once."""
        if ended.stopped and self.stopping:
            saved = node.artifact(self.plan.store).checkpoint_steps() if node.end_step is not None else []
            kept = f"; checkpoints at steps {', '.join(map(str, saved))}" if saved else ""
            raise Interrupted(f"{node.name} was interrupted: {ended.stopped}{kept}")
        lease.check()
        if ended.stopped:
            raise StageFailed(f"{node.name}: {ended.stopped}", again=True)
        if (error := ended.error) is not None:
            message = f"{node.name}: {error.message} (log: {log})"
            if error.damaged is not None:
                self._withdraw_damaged(node, error.damaged, message, lease)
                return
            if error.interrupted:  # by a third party or by the time limit
                self.stop(error.message)
                raise Interrupted(f"{node.name} was interrupted: {error.message}")
            raise StageFailed(message, again=error.again)
        end = f"ended with exit code {ended.code} and no result: {ended.last_words} (log: {log})"
        raise StageFailed(f"{node.name}: {end}", again=True)

    def _keep_log(self, job: Job, scratch: Path) -> str:
        """Stores the output of an attempt; returns its path."""
        path = f"{job.path}/logs/{job.attempt}.txt"  # the attempt's folder may be an exported model
        log = scratch / "log.txt"
        log.touch()
        try:
            self.plan.store.upload(log, path)
        except (OSError, StoreError) as error:  # the attempt is judged nevertheless
            self.observer.note(job.node, f"its log could not be stored: {error}")
            return "could not be stored"
        return self.plan.store.location(path)

    def _job(self, node: Node, step: Step, scratch: Path, lease: Lease) -> Job:
        return Job(
            pipeline=self.plan.pipeline.name,
            node=node.name,
            kind=node.kind,
            version=node.version,
            fingerprint=node.fingerprint,
            spec=node.part.to_json(),
            identity=node.identity,
            inputs={role: self._input(node, input_) for role, input_ in node.inputs.items()},
            launch=self.profile.launch_of(node.launch),
            store=self.plan.store.url,
            path=node.path,
            attempt=lease.holder.attempt,
            lease=lease.generation,
            scratch=str(scratch),
            progress=str(scratch / "progress.jsonl"),
            resume_step=self.sound_checkpoint(node, step.resume_step, lease),
            profile=self.profile,
            tracking=self.plan.pipeline.tracking,
            gpus=node.part.gpus_of_worker(node.launch),
            launched_at=time.time(),
        )

    def _input(self, node: Node, input_: Input) -> InputRef:
        reference = InputRef(
            kind=input_.kind, fingerprint=input_.fingerprint, name=input_.name, path=input_.place
        )
        if input_.place is None or input_.step is None:
            return reference
        hold(self.plan.store, input_.place, input_.step, node.path)
        checkpoint = Artifact(self.plan.store, input_.place).checkpoint(input_.step)
        checkpoint.check(content=False)
        return reference.model_copy(update={"step": input_.step, "checkpoint": checkpoint.folder})

    def sound_checkpoint(self, node: Node, step: int | None, lease: Lease | None = None) -> int | None:
        """The last checkpoint of the part's trajectory, up to `step`, with files of the stated lengths; the
        stage compares their content. Damaged ones are withdrawn, so that the step can be committed again."""
        artifact = node.artifact(self.plan.store)
        for candidate in reversed(self._own_steps(node)):
            if step is None or candidate > step:
                continue
            try:
                artifact.checkpoint(candidate).check(content=False)
                return candidate
            except StoreError as error:
                self._withdraw(node, [candidate], error, lease)
        return None

    def _own_steps(self, node: Node) -> list[int]:
        """Steps of the stored checkpoints that the part itself has made."""
        steps = node.artifact(self.plan.store).checkpoint_steps()
        return [step for step in steps if step > node.start_step]

    def _withdraw_damaged(self, node: Node, damaged: DamagedInput, message: str, lease: Lease) -> None:
        """Handles a checkpoint that a stage found damaged while reading. A checkpoint of the part itself is
        withdrawn, with those after it (a rollback may read an earlier one), and the next attempt resumes from
        the one before. StageFailed for a checkpoint of another part, and for one that is sound when it
        is read again in full."""
        own = self._own_steps(node)
        if damaged.artifact != node.path or damaged.step not in own:
            raise StageFailed(message, again=False)
        try:
            node.artifact(self.plan.store).checkpoint(damaged.step).check()
        except StoreError as error:
            self._withdraw(node, [later for later in own if later >= damaged.step], error, lease)
            return
        raise StageFailed(f"{message}; a second reading found no damage", again=True)

    def _withdraw(self, node: Node, steps: list[int], error: StoreError, lease: Lease | None) -> None:
        """Withdraws checkpoints, the last one first, so that the rest never has a gap."""
        for step in reversed(steps):
            if lease is not None:
                lease.check()
            problem = f"checkpoint {step} is withdrawn, the one before it is used: {error}"
            self.observer.note(node.name, problem)
            node.artifact(self.plan.store).withdraw(step)


def attempt_id() -> str:
    return f"{datetime.now(UTC).strftime('%Y%m%dT%H%M%S')}-{uuid.uuid4().hex[:8]}"


def _note_inputs(plan: Plan) -> None:
    """Records the files of the sources, and references beside the checkpoints that parts start from."""
    for name, listing in plan.graph.listings.items():
        lock(plan.store, listing, plan.graph.digests[name])
    for node, parent, step in plan.graph.starts(plan.pipeline):
        refer(plan.store, parent.path, step, node.path)
