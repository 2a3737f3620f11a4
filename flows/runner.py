"""Runs one part: makes the job, starts its process, and judges the outcome by the store.

Invariant: a part counts as finished when its manifest is in the store, whatever its process returned; a process that returned 0 without one
has failed. Nothing is started while the runner is stopping.
"""

from __future__ import annotations

import shutil
import threading
import time
import uuid
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol

from flows.graph import Node
from flows.nearest import Records
from flows.plan import Plan, Step, decide
from infra.launch import Ended, Process, make_scratch
from infra.store import Artifact, StoreError
from infra.store.inputs import lock
from specs.base import Spec
from specs.job import InputRef, Job
from specs.pipeline import CHECKPOINTS

DISTRIBUTED = {*CHECKPOINTS, "evaluate", "probe", "log_probabilities"} - {"select"}  # kinds that run on the training engine, under torchrun


class StageFailed(RuntimeError):
    """A part that did not reach its manifest. `again`: another attempt may succeed."""

    def __init__(self, message: str, *, again: bool) -> None:
        super().__init__(message)
        self.again = again


class GateFailed(RuntimeError):
    """A finished evaluation that does not meet a bound of the recipe."""


class Interrupted(RuntimeError):
    """The part was stopped from outside; what it had committed is kept, and the next run goes on from there."""


class Observer(Protocol):
    """Who watches a run: the terminal, Prefect's logs."""

    def begin(self, step: Step) -> None: ...
    def line(self, name: str, text: str) -> None: ...
    def note(self, name: str, text: str) -> None: ...
    def progress(self, name: str, row: dict[str, Any]) -> None: ...
    def end(self, step: Step, outcome: str, seconds: float, metrics: dict[str, Any] | None) -> None: ...


class Runner:
    """Runs the parts of one plan. Safe to call from several threads; `stop` may come from any."""

    def __init__(self, plan: Plan, observer: Observer) -> None:
        self.plan = plan
        self.observer = observer
        self.stopping = ""
        self._processes: set[Process] = set()
        self._lock = threading.Lock()

    def prepare(self) -> None:
        """Records, before anything runs, what the run refers to and what the sources held."""
        plan = self.plan
        plan.store.initialise()
        for name, listing in plan.graph.listings.items():
            lock(plan.store, listing, plan.graph.digests[name])
        Records(plan.store, plan.pipeline.name).write(plan.graph, plan.pipeline.model_dump(mode="json", by_alias=True))

    def stop(self, reason: str) -> None:
        """Ends what is running, with a checkpoint where there is one to write; nothing is started any more."""
        with self._lock:
            self.stopping = self.stopping or reason
            running = list(self._processes)
        for process in running:
            process.stop(reason)

    def run(self, name: str) -> Step:
        """Runs a part, or finds it finished. Its state afterwards. StageFailed, GateFailed or Interrupted otherwise."""
        node = self.plan.graph.nodes[name]
        begun = time.monotonic()
        step = decide(node, self.plan)
        outcome = "reused" if step.action == "reuse" else "finished"
        if step.action != "reuse":
            if self.stopping:
                raise Interrupted(f"{name} was not started: {self.stopping}")
            self.observer.begin(step)
            try:
                self._attempt(node, step)
            except (StageFailed, Interrupted) as error:
                self.observer.end(step, str(error).splitlines()[0], time.monotonic() - begun, None)
                raise
            step = decide(node, self.plan)
        metrics = Artifact(self.plan.store, node.path, node.end_step).manifest["metrics"] if step.action == "reuse" else None
        if step.gate_failures:
            self.observer.end(step, step.gate_failures[0], time.monotonic() - begun, metrics)
            raise GateFailed("; ".join(step.gate_failures))
        self.observer.end(step, outcome, time.monotonic() - begun, metrics)
        return step

    def _attempt(self, node: Node, step: Step) -> None:
        scratch = make_scratch(node.name)
        try:
            job = self._job(node, step, scratch)
            process = Process(job, node.launch, distributed=node.kind in DISTRIBUTED)
            with self._lock:
                self._processes.add(process)
                stopping = self.stopping
            if stopping:
                process.stop(stopping)
            try:
                ended = process.run(lambda text: self.observer.line(node.name, text), lambda row: self.observer.progress(node.name, row))
            except BaseException:
                process.stop("the launcher failed")
                raise
            finally:
                with self._lock:
                    self._processes.discard(process)
            self._judge(node, ended, self._keep_log(job, scratch))
        finally:
            shutil.rmtree(scratch, ignore_errors=True)

    def _judge(self, node: Node, ended: Ended, log: str) -> None:
        if Artifact(self.plan.store, node.path, node.end_step).complete:
            return
        if ended.stopped and self.stopping:
            saved = Artifact(self.plan.store, node.path).checkpoint_steps() if node.end_step is not None else []
            kept = f"; checkpoints at steps {', '.join(map(str, saved))}" if saved else ""
            raise Interrupted(f"{node.name} was interrupted: {ended.stopped}{kept}")
        if ended.stopped:
            raise StageFailed(f"{node.name}: {ended.stopped}", again=True)
        if ended.error:
            raise StageFailed(f"{node.name}: {ended.error['message']} (log: {log})", again=bool(ended.error["again"]))
        last = ended.tail[-1] if ended.tail else "it printed nothing"
        raise StageFailed(f"{node.name}: ended with exit code {ended.code} and no result: {last} (log: {log})", again=True)

    def _keep_log(self, job: Job, scratch: Path) -> str:
        """Stores what the attempt printed, whatever became of it; where."""
        path = f"{job.path}/attempts/{job.attempt}/log.txt"
        log = scratch / "log.txt"
        log.touch()
        self.plan.store.upload(log, path)
        return self.plan.store.location(path)

    def _job(self, node: Node, step: Step, scratch: Path) -> Job:
        inputs = {role: self._input(read) for role, read in node.inputs.items()}
        resume = self.sound_checkpoint(node, step.resume_step)
        attempt = f"{datetime.now(UTC).strftime('%Y%m%dT%H%M%S')}-{uuid.uuid4().hex[:8]}"
        return Job(
            node=node.name,
            kind=node.kind,
            version=node.version,
            fingerprint=node.fingerprint,
            spec=_dump(node.part),
            identity=node.identity,
            inputs=inputs,
            launch=_dump(node.launch),
            store=self.plan.store.url,
            path=node.path,
            attempt=attempt,
            scratch=str(scratch),
            progress=str(scratch / "progress.jsonl"),
            resume_step=resume,
            resume_checkpoint=Artifact(self.plan.store, node.path).checkpoint(resume).folder if resume is not None else None,
            launched_at=time.time(),
        )

    def _input(self, read: Any) -> InputRef:
        if read.node is None:
            return InputRef(kind=read.kind, fingerprint=read.fingerprint, name=read.name)
        path = self.plan.graph.nodes[read.node].path
        folder = None
        if read.step is not None:
            artifact = Artifact(self.plan.store, path)
            checkpoint = artifact.checkpoint(read.step)
            artifact.verify_checkpoint(checkpoint)
            folder = checkpoint.folder
        return InputRef(kind=read.kind, fingerprint=read.fingerprint, name=read.name, path=path, step=read.step, checkpoint=folder)

    def sound_checkpoint(self, node: Node, step: int | None) -> int | None:
        """The last checkpoint of the part's own trajectory, up to `step`, whose files are what its marker states.

        The marker of a damaged one is withdrawn, so that the step can be committed again."""
        artifact = Artifact(self.plan.store, node.path)
        usable = [s for s in artifact.checkpoint_steps() if step is not None and (node.start_step or 0) < s <= step]
        for candidate in reversed(usable):
            try:
                artifact.verify_checkpoint(artifact.checkpoint(candidate))
                return candidate
            except StoreError as error:
                self.observer.note(node.name, f"checkpoint {candidate} is withdrawn, the one before it is used: {error}")
                artifact.withdraw(candidate)
        return None


def _dump(spec: Spec) -> dict[str, Any]:
    return spec.model_dump(mode="json", by_alias=True)
