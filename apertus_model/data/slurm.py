"""Tasks of a stage as a Slurm job array: submits it, watches a folder for results, and cancels remaining
jobs.

The folder is the tasks' scratch, which the nodes must see too. It has `array.json` (the specification of the
tasks), `tokenizer.json`, `alive` (changes while the stage lives), `logs/<job>_<element>.txt`, and a result
per finished task (`apertus_model.data.array_task`). Nothing in it is code; the stage commits results to the
store.

datatrove's `SlurmPipelineExecutor` is not used: it passes the pipeline as a pickle, does not record our
counts, names only the last of several jobs, so that the others cannot be cancelled, and always submits a job
that merges statistics. Each task still is datatrove's pipeline, run as on one machine.

Invariants:
- No array outlives its stage: it is cancelled when the stage stops or fails; a running task whose stage was
killed ends.
- A result counts when all its files are seen with their sizes; a task that ends without one is an error at
once.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import shlex
import shutil
import sys
import threading
import time
from collections import deque
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from pydantic_core import to_jsonable_python

from apertus_model.data.array_task import ALIVE, SPECIFICATION, ArrayTasks, result_file
from apertus_model.progress import TaskProgress
from apertus_model.stop import StopSignal
from infra import slurm
from infra.slurm import ENDED, SlurmError
from specs.errors import StageError
from specs.launch import SlurmTask
from specs.profile import SlurmProfile

if TYPE_CHECKING:
    from apertus_model.data.conversation_tasks import ConversationTasks
    from apertus_model.data.tokenise import CorpusTasks

POLL_SECONDS = 5.0
VISIBLE_SECONDS = 30.0  # delay with which a shared folder may show files of another machine
LOST_SECONDS = 600.0  # without a sign of life of the stage, until its tasks end
ARRAY_SIZE = 1000  # tasks of one job; Slurm's own limit is 1001 unless it is configured
LOG_LINES = 20


class Stopped(RuntimeError):
    """The stage was asked to stop while it waited."""


class ArrayResult(NamedTuple):
    """The result of a task."""

    files: dict[str, Path]  # by name
    counts: dict[str, Any]


def run_array(
    work: CorpusTasks | ConversationTasks,
    ranks: list[int],
    task: SlurmTask,
    cluster: SlurmProfile,
    stop: StopSignal,
    progress: TaskProgress,
) -> Generator[tuple[int, ArrayResult], None, None]:
    """Runs tasks on Slurm and yields each with its rank when its result is seen. All jobs are cancelled when the generator ends early.

    Raises:
        StageError: of a task, or SlurmMissing.
        SlurmError: Slurm refused, or a task ended without a result.
        Stopped: `stop` was requested.
    """
    if not ranks:
        return
    array = _Array(work.folder, ranks)
    array.write(work, task.cpus)
    waited_for = dict(enumerate(ranks))
    ended: dict[int, float] = {}
    failure: StageError | SlurmError | None = None
    with _signs_of_life(work.folder / ALIVE), stop.cooperating():
        try:
            array.submit(task, cluster)
            while waited_for:
                states = array.states()  # asked before the folder is looked at: what has ended by now had its chance to be seen
                for element, rank in list(waited_for.items()):
                    if stop.requested:
                        raise Stopped(f"stopped ({stop.reason}): the Slurm jobs {', '.join(array.jobs)} were cancelled")
                    try:
                        result = _result(work.folder, rank)
                    except (StageError, SlurmError) as error:
                        failure = failure or error
                        continue
                    if result is not None:
                        del waited_for[element]
                        yield rank, result
                    elif states is None or (state := states.get(element, "gone")) not in {*ENDED, "gone"}:
                        ended.pop(element, None)
                    elif time.monotonic() - ended.setdefault(element, time.monotonic()) >= VISIBLE_SECONDS:
                        failure = failure or SlurmError(array.story(element, state))
                if failure is not None:  # behind the others: what is finished is kept
                    raise failure
                if not waited_for:
                    break
                if states is not None:
                    alive = [state for element, state in states.items() if element in waited_for and state not in ENDED]
                    progress.waiting(running=alive.count("RUNNING"), queued=len(alive) - alive.count("RUNNING"))
                stop.wait(POLL_SECONDS)
        finally:
            if waited_for:
                array.cancel()
    if stop.requested:
        raise Stopped(f"stopped ({stop.reason}); all tasks are committed")


class _Array:
    """Elements 0, 1, ... of an array stand for the ranks of the tasks, `ARRAY_SIZE` of them in each job."""

    def __init__(self, folder: Path, ranks: list[int]) -> None:
        self.folder = folder
        self.ranks = ranks
        self.jobs: list[str] = []

    def write(self, work: CorpusTasks | ConversationTasks, cpus: int) -> None:
        """What the nodes read."""
        (self.folder / "logs").mkdir(exist_ok=True)
        tokenizer = self.folder / "tokenizer.json"
        shutil.copyfile(work.tokenizer, tokenizer)
        fields = to_jsonable_python(work._replace(tokenizer=tokenizer)._asdict())
        tasks = ArrayTasks(kind=type(work).__name__, work=fields, ranks=self.ranks, cpus=cpus, lost_seconds=LOST_SECONDS)
        (self.folder / SPECIFICATION).write_text(tasks.model_dump_json())

    def submit(self, task: SlurmTask, cluster: SlurmProfile) -> None:
        for first in range(0, len(self.ranks), ARRAY_SIZE):
            elements = min(ARRAY_SIZE, len(self.ranks) - first)
            script = self.folder / f"array-{first}.sh"
            program = [sys.executable, "-m", "apertus_model.data.array_task", str(self.folder / SPECIFICATION), str(first)]
            script.write_text(f"#!/bin/sh\nexec {' '.join(map(shlex.quote, program))}\n")
            options: slurm.Options = {
                **cluster.arguments,
                **{"job-name": "apertus-tasks", "array": f"0-{elements - 1}", "output": str(self.folder / "logs" / "%A_%a.txt")},
                **{"open-mode": "append", "export": "ALL", "ntasks": 1, "cpus-per-task": task.cpus, "mem": task.memory},
                **{"partition": cluster.partition, "time": slurm.minutes(task.time_limit)},
            }
            self.jobs.append(slurm.submit(script, options))

    def states(self) -> dict[int, str] | None:
        """Slurm's state of each element that it still knows; None when it does not answer."""
        answer = slurm.command("squeue", f"--jobs={','.join(self.jobs)}", "--states=all", "--array", "--noheader", "--format=%F %K %T")
        if answer.returncode and "Invalid job id" not in answer.stderr:
            return None
        rows = (line.split() for line in answer.stdout.splitlines())
        return {self.jobs.index(job) * ARRAY_SIZE + int(element): state for job, element, state in rows if job in self.jobs}

    def story(self, element: int, state: str) -> str:
        """What is known of a task that ended without a result."""
        job = f"{self.jobs[element // ARRAY_SIZE]}_{element % ARRAY_SIZE}"
        log = self.folder / "logs" / f"{job}.txt"
        task = f"task {self.ranks[element]} (Slurm job {job}, {state})"
        if not log.exists():
            return (
                f"{task} left neither a result nor a log in {self.folder}. Fix: a scratch folder that the nodes see at the same path "
                "(APERTUS_SCRATCH), if it was not cancelled"
            )
        with log.open(encoding="utf-8", errors="replace") as file:
            lines = deque(file, LOG_LINES)
        return f"{task} ended without a result; its log ends:\n{''.join(lines) or '(empty)'}".rstrip()

    def cancel(self) -> None:
        if problem := slurm.cancel(self.jobs):
            print(f"scancel {' '.join(self.jobs)} failed: {problem}", file=sys.stderr, flush=True)


def _result(folder: Path, rank: int) -> ArrayResult | None:
    """The result of a task, once it and all its files are seen. StageError or SlurmError for a task that ended with an error."""
    try:
        result = json.loads(result_file(folder, rank).read_text())
    except FileNotFoundError:
        return None
    if "error" in result:
        raise (SlurmError if result["again"] else StageError)(result["error"])
    files = {name: folder / record["path"] for name, record in result["files"].items()}
    seen = all(path.exists() and path.stat().st_size == result["files"][name]["size"] for name, path in files.items())
    return ArrayResult(files, result["counts"]) if seen else None


@contextlib.contextmanager
def _signs_of_life(file: Path) -> Iterator[None]:
    """Rewrites a file again and again, in a thread: a long commit is life too."""
    over = threading.Event()

    def write() -> None:
        for count in itertools.count():
            with contextlib.suppress(OSError):
                file.write_text(str(count))
            if over.wait(POLL_SECONDS):
                return

    thread = threading.Thread(target=write, name="signs-of-life", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
