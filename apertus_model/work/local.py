"""A pool of workers on this machine: each has its own share of the GPUs, and takes the next unit when it has
committed one.

Invariant: no worker outlives its stage: each ends when its standard input does, whose write end only the
stage has. (datatrove's own process pool starts a manager process that survives a `kill -9` of its parent, so
units are handed out here.)
"""

from __future__ import annotations

import os
import queue
import subprocess
import sys
import threading
from collections import Counter, deque
from collections.abc import Generator

from pydantic import TypeAdapter

from apertus_model.work.units import MOST_LOSSES, Committed, WorkerLost, error_of
from infra.liveness import python_path
from specs.errors import StageError, counted
from specs.job import Failure, Job

END_SECONDS = 30.0  # for the end of a worker that has no more work
ANSWERS: TypeAdapter[Committed | Failure] = TypeAdapter(Committed | Failure)


def workers_here(job: Job, processes: int, *, by_count: bool = True) -> int:
    """The number of workers on this machine: that of launch.workers (if `by_count`), else GPUs / GPUs per
    worker, else `processes`. StageError for more workers than the GPUs allow."""
    count = job.launch.worker_count if by_count else None
    there = len(_gpus()) if job.gpus else 0
    if count is not None and 0 < there < count * job.gpus:
        raise StageError(
            f"launch.workers.count is {count}, with {job.gpus} GPUs for each; this machine has {there}. Fix:"
            f" use at most {there // job.gpus} workers"
        )
    return count or (max(1, there // job.gpus) if there else processes)


def _gpus() -> list[str]:
    from apertus_model.device import visible_gpus

    return visible_gpus()


def run_in_processes(job: Job, keys: list[str], workers: int) -> Generator[str, None, None]:
    """Has units computed by `workers` processes, which end with the generator, and yields the key of each
    when it is committed. A unit whose worker ended without an error for users is handed out again. StageError
    when a unit raised it, WorkerLost when `MOST_LOSSES` workers ended with the same unit."""
    pool = _Pool(job, deque(keys))
    losses: Counter[str] = Counter()
    try:
        for number in range(workers):
            pool.start(number)
        while pool.workers:
            worker, answer = pool.answers.get()
            key = worker.key
            if isinstance(answer, Committed):
                worker.key = None
                pool.hand_out(worker)
                yield answer.unit
                continue
            if isinstance(answer, Failure):
                worker.failure = answer
                continue
            code = pool.end(worker)
            if key is None:
                continue
            lost = f"the worker of unit {key} ended with exit code {code}; its output above says why"
            failure = worker.failure or Failure(message=lost, again=True)
            losses[key] += 1
            if not failure.again or losses[key] == MOST_LOSSES:
                raise error_of(failure)
            print(f"unit {key} is begun again: {failure.message}", flush=True)
            pool.keys.appendleft(key)
            pool.start(worker.number)
        if pool.keys:
            raise WorkerLost(f"no worker is left for {counted(len(pool.keys), 'unit')}")
    finally:
        pool.close()


class _Worker:
    """A worker process, and the unit that it has."""

    def __init__(self, job: Job, number: int, answers: queue.SimpleQueue[_Answer]) -> None:
        self.number = number
        self.key: str | None = None
        self.failure: Failure | None = None
        reader, write = os.pipe()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "apertus_model.work.worker", str(write)],
            stdin=subprocess.PIPE,
            pass_fds=[write],
            env=_environment(job, number),
            text=True,
        )
        os.close(write)
        self.say(job.model_dump_json())
        threading.Thread(target=self._listen, args=(reader, answers), daemon=True).start()

    def say(self, line: str) -> None:
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(line + "\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            pass  # the process has ended, which its other pipe shows

    def end(self) -> int:
        """Waits for the end of the process, which comes at once, or kills it. Returns its exit code."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.close()
        except BrokenPipeError:
            pass
        try:
            return self.process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return self.process.wait()

    def _listen(self, pipe: int, answers: queue.SimpleQueue[_Answer]) -> None:
        with os.fdopen(pipe) as lines:
            for line in lines:
                if line.endswith("\n"):
                    answers.put((self, ANSWERS.validate_json(line)))
        answers.put((self, None))


_Answer = tuple[_Worker, Committed | Failure | None]  # None: the process has ended


class _Pool:
    """Workers, and the keys of the units that no worker has yet."""

    def __init__(self, job: Job, keys: deque[str]) -> None:
        self.keys = keys
        self.workers: set[_Worker] = set()
        self.answers: queue.SimpleQueue[_Answer] = queue.SimpleQueue()
        self._job = job

    def start(self, number: int) -> None:
        worker = _Worker(self._job, number, self.answers)
        self.workers.add(worker)
        self.hand_out(worker)

    def hand_out(self, worker: _Worker) -> None:
        """Gives the worker the next unit, or ends it if no unit is left."""
        if self.keys:
            worker.key = self.keys.popleft()
            worker.say(worker.key)
        else:
            self.end(worker)

    def end(self, worker: _Worker) -> int:
        self.workers.discard(worker)
        return worker.end()

    def close(self) -> None:
        for worker in list(self.workers):
            worker.process.kill()
            self.end(worker)


def _environment(job: Job, number: int) -> dict[str, str]:
    """The environment of worker `number`, with its slice of the GPUs and one thread for its tokenizer."""
    environment = {**os.environ, "TOKENIZERS_PARALLELISM": "false", "PYTHONPATH": python_path()}
    if job.gpus and (gpus := _gpus()):
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(gpus[number * job.gpus : (number + 1) * job.gpus])
    return environment
