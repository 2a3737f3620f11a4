"""Runs the units of a stage in Slurm job arrays, whose workers have a share of the units each and are watched
through the store.

Below the folder of the attempt, `workers/` has `<n>.json` (the shares of job n), `alive` (changes while the
stage lives), and `failures/<n>-<index>.json` (the error of a worker). Nothing in it is code, and it is
removed when the stage ends.

Invariants:
- No job outlives its stage: it is cancelled when the stage stops or fails, and a worker whose stage was
  killed ends itself.
- The units that a worker has committed count, however it ended. The rest of its share is submitted again,
  unless its error is one for users.

datatrove's `SlurmPipelineExecutor` is not used: it passes the pipeline as a pickle, does not record our
counts, names only the last of several jobs, so that the others cannot be cancelled, and always submits a job
that merges statistics.
"""

from __future__ import annotations

import itertools
import shlex
import sys
from collections import Counter
from collections.abc import Generator, Iterator
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path

from apertus_model.progress import UnitProgress
from apertus_model.stop import StopSignal
from apertus_model.work.units import MOST_LOSSES, Shares, error_of, failure_file, spans
from infra import slurm
from infra.liveness import BEAT_SECONDS, LOST_SECONDS, beating
from infra.store import Attempt
from infra.store.documents import to_json
from specs.errors import counted
from specs.job import Failure, Job
from specs.launch import Workers


class Stopped(RuntimeError):
    """The stage was asked to stop while it waited."""


def run_on_cluster(
    jobs: JobArrays, keys: list[str], attempt: Attempt, stop: StopSignal, progress: UnitProgress
) -> Generator[str, None, None]:
    """Has units computed on a cluster, and yields the key of each when it is seen to be committed. No job is
    left when the generator ends. StageError when a unit raised it, or this machine cannot reach the cluster;
    WorkerLost when `MOST_LOSSES` workers ended with the same unit; Stopped when `stop` was requested."""
    if not keys:
        return
    shared = _Workers(jobs, attempt)
    with shared.heartbeat(), stop.cooperating():
        try:
            shared.submit(keys)
            while shared.waiting:
                # read before the units, so that all units of a worker that has ended are seen below
                states = jobs.states()
                yield from shared.newly_committed()
                if stop.requested:
                    break
                if states is not None:
                    shared.submit_again(states)
                    running = sum(states.get(name) == "RUNNING" for name in shared.waiting)
                    progress.waiting(running=running, queued=len(shared.waiting) - running)
                if shared.waiting:
                    stop.wait(jobs.POLL_SECONDS)
        finally:
            names = jobs.end(finished=not shared.waiting)
            shared.clean()
    if stop.requested:
        left = f"{names} were cancelled" if shared.waiting else "all units are committed"
        raise Stopped(f"stopped ({stop.reason}): {left}")


class _Workers:
    """The workers of a stage. `waiting`: keys that are not committed yet, by the worker that has them."""

    def __init__(self, jobs: JobArrays, attempt: Attempt) -> None:
        self.waiting: dict[str, list[str]] = {}
        self._jobs = jobs
        self._attempt = attempt
        self._store = attempt.store
        self._folder = attempt.folder("workers")
        self._alive = f"{self._folder}/alive"
        self._numbers = itertools.count()
        self._losses: Counter[str] = Counter()

    def heartbeat(self) -> AbstractContextManager[None]:
        """A context in which a thread keeps rewriting `alive`."""
        return beating(partial(self._store.overwrite, self._alive), 4 * BEAT_SECONDS, "heartbeat for workers")

    def submit(self, keys: list[str]) -> None:
        """Divides units among the workers of as many jobs as it takes."""
        launch, most = self._attempt.job.launch, self._jobs.MOST
        size = launch.workers.units_per_job if launch.workers is not None else 1
        shares = [keys[slice(*span)] for span in spans(len(keys), size)]
        for first in range(0, len(shares), most):
            number, some = next(self._numbers), shares[first : first + most]
            file = f"{self._folder}/{number}.json"
            job, cpus = self._attempt.job, self._jobs.cpus
            shares_of_job = Shares(
                job=job, shares=some, alive=self._alive, lost_seconds=LOST_SECONDS, cpus=cpus
            )
            self._store.write_bytes(file, to_json(shares_of_job))
            self._jobs.submit(number, file, len(some))
            self.waiting |= {f"{number}-{index}": share for index, share in enumerate(some)}

    def newly_committed(self) -> Iterator[str]:
        """Yields the waiting units that are in the store now, whichever process committed them."""
        there = {name.removesuffix(".json") for name in self._store.names(f"{self._attempt.job.path}/units")}
        for worker, keys in list(self.waiting.items()):
            left = [key for key in keys if key not in there]
            if left:
                self.waiting[worker] = left
            else:
                del self.waiting[worker]
            yield from (key for key in keys if key in there)

    def submit_again(self, states: dict[str, str]) -> None:
        """Resubmits the units of ended workers. StageError, or WorkerLost, when that is of no use."""
        failed = {name.removesuffix(".json") for name in self._store.names(f"{self._folder}/failures")}
        keys: list[str] = []
        for worker in list(self.waiting):
            state = states.get(worker, "gone")
            if worker in failed:
                file = failure_file(self._folder, worker)
                failure = Failure.model_validate_json(self._store.read_bytes(file))
            elif self._jobs.over(worker, state):
                failure = Failure(message=self._jobs.explanation(worker, state), again=True)
            else:
                continue
            left = self.waiting[worker]
            self._losses[left[0]] += 1  # the worker had begun this unit
            if not failure.again or self._losses[left[0]] == MOST_LOSSES:
                raise error_of(failure)
            print(
                f"{counted(len(left), 'unit is', 'units are')} submitted again: {failure.message}", flush=True
            )
            del self.waiting[worker]
            keys += left
        if keys:
            self.submit(keys)

    def clean(self) -> None:
        """Removes the files of the workers."""
        try:
            for folder in (f"{self._folder}/failures", self._folder):
                for name in self._store.names(folder):
                    self._store.remove(f"{folder}/{name}")
        except OSError as error:
            print(f"{self._folder} could not be removed: {error}", file=sys.stderr, flush=True)


class JobArrays:
    """The arrays of the workers of a stage, and their logs, `work/logs/<job>_<element>.txt` in the scratch
    folder of the attempt, which the nodes see too. `cpus`: of each worker."""

    MOST = 1000  # elements of an array; Slurm's own limit is 1001 unless configured
    POLL_SECONDS = slurm.POLL_SECONDS

    def __init__(self, job: Job) -> None:
        self._job = job
        self._profile = job.profile.slurm
        self._workers = job.launch.workers or Workers()
        self._folder = Path(job.scratch) / "work"
        self._jobs = slurm.Jobs()
        self._names: dict[str, str] = {}  # Slurm's names of the jobs, by number
        self.cpus = self._workers.cpus or (self._profile.cpus_per_task if job.gpus else None) or 1

    def submit(self, number: int, shares: str, workers: int) -> None:
        """Submits array `number`, whose element `i` runs `apertus_model.work.worker STORE shares i`.
        SlurmError when sbatch refuses it, StageError when there is no sbatch."""
        logs = self._folder / "logs"
        logs.mkdir(exist_ok=True)
        script = self._folder / f"workers-{number}.sh"
        profile, settings = self._job.profile, self._workers
        module = shlex.join(["-m", "apertus_model.work.worker", self._job.store, shares])
        lines = [
            "#!/bin/bash",
            *slurm.setup_lines(profile),
            *slurm.exports(profile, {}),
            f'exec {slurm.python(profile)} {module} "$SLURM_ARRAY_TASK_ID"',
        ]
        script.write_text("\n".join([*lines, ""]))
        limit = f"%{settings.count}" if settings.count is not None else ""
        bounds = self.cpus, settings.memory, settings.time_limit
        usual = slurm.options(self._profile, "apertus-workers", logs / "%A_%a.txt", *bounds)
        options = {**usual, "array": f"0-{workers - 1}{limit}", "ntasks": 1}
        if self._job.gpus and not any("gpus" in name or name == "gres" for name in self._profile.arguments):
            options["gpus-per-task"] = self._job.gpus
        self._names[str(number)] = self._jobs.submit(script, options)

    def states(self) -> dict[str, str] | None:
        """Slurm's state of each worker, by `<number>-<index>`; None when it does not answer."""
        states = self._jobs.states()
        if states is None:
            return None
        numbers = {name: number for number, name in self._names.items()}
        elements = ((element.partition("_"), state) for element, state in states.items())
        return {f"{numbers[job]}-{index}": state for (job, _, index), state in elements if index}

    def over(self, worker: str, state: str) -> bool:
        """Whether a worker in this state has ended, and everything that it committed is visible."""
        return self._jobs.over_for_long(worker, state in slurm.ENDED)

    def explanation(self, worker: str, state: str) -> str:
        """How a worker ended, as far as Slurm and its log tell."""
        number, _, index = worker.partition("-")
        element = f"{self._names[number]}_{index}"
        log = self._folder / "logs" / f"{element}.txt"
        lost = f"the worker of Slurm job {element} ({state})"
        if not log.exists():
            return (
                f"{lost} left neither units nor a log in {self._folder}."
                " Fix: use a scratch folder and a store that the nodes see at the same path"
                " (APERTUS_SCRATCH, --store), if it was not cancelled"
            )
        ended = f"{lost} ended before its units were committed"
        return f"{ended}; its log ends:\n{slurm.last_lines(log)}"

    def end(self, *, finished: bool) -> str:
        """Cancels the jobs, unless all workers have ended. Returns their names, for people."""
        if not finished and (problem := self._jobs.cancel()):
            print(f"scancel {' '.join(self._jobs.numbers)} failed: {problem}", file=sys.stderr, flush=True)
        return f"the Slurm jobs {', '.join(self._jobs.numbers)}"
