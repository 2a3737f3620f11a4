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
- A result counts when all its files are seen with their sizes. A task that ends without a result is an error
  at once.
"""

from __future__ import annotations

import json
import shlex
import shutil
import sys
from collections import deque
from collections.abc import Generator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from pydantic_core import to_jsonable_python

from apertus_model.data.array_task import ALIVE, SPECIFICATION, ArrayTasks, result_file
from apertus_model.progress import TaskProgress
from apertus_model.stop import StopSignal
from infra import slurm
from infra.liveness import LOST_SECONDS, beats_in_file
from infra.slurm import ENDED, SlurmError
from specs.errors import StageError
from specs.launch import SlurmTask
from specs.profiles import SlurmProfile

if TYPE_CHECKING:
    from apertus_model.data.conversation_tasks import ConversationTasks
    from apertus_model.data.tokenise import CorpusTasks

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
    """Runs tasks on Slurm and yields each with its rank when its result is seen. All jobs are cancelled when
    the generator ends early.

    Raises:
        StageError: of a task, or SlurmMissing.
        SlurmError: Slurm refused, or a task ended without a result.
        Stopped: `stop` was requested.
    """
    if not ranks:
        return
    array = _Array(work.folder, ranks)
    array.write(work, task.cpus)
    failure: StageError | SlurmError | None = None
    with beats_in_file(work.folder / ALIVE), stop.cooperating():
        try:
            array.submit(task, cluster)
            while array.waiting:
                # read before the folder, so that the results of jobs that have ended are looked for below
                states = array.jobs.states()
                for name, rank in list(array.waiting.items()):
                    if stop.requested:
                        raise Stopped(
                            f"stopped ({stop.reason}): the Slurm jobs {', '.join(array.jobs.numbers)} were"
                            " cancelled"
                        )
                    try:
                        result = _result(work.folder, rank)
                    except (StageError, SlurmError) as error:
                        failure = failure or error
                        continue
                    if result is not None:
                        del array.waiting[name]
                        yield rank, result
                    elif states is not None:
                        state = states.get(name, "gone")
                        if array.jobs.over_for_long(name, state in ENDED):
                            failure = failure or SlurmError(array.story(name, rank, state))
                if failure is not None:  # raised after the loop, which keeps the results of finished tasks
                    raise failure
                if not array.waiting:
                    break
                if states is not None:
                    alive = [
                        state
                        for name, state in states.items()
                        if name in array.waiting and state not in ENDED
                    ]
                    progress.waiting(
                        running=alive.count("RUNNING"), queued=len(alive) - alive.count("RUNNING")
                    )
                stop.wait(slurm.POLL_SECONDS)
        finally:
            if array.waiting:
                array.cancel()
    if stop.requested:
        raise Stopped(f"stopped ({stop.reason}); all tasks are committed")


class _Array:
    """Jobs of `ARRAY_SIZE` elements each. `waiting`: ranks of tasks without a result, by element (`7_0`)."""

    def __init__(self, folder: Path, ranks: list[int]) -> None:
        self.folder = folder
        self.ranks = ranks
        self.jobs = slurm.Jobs()
        self.waiting: dict[str, int] = {}

    def write(self, work: CorpusTasks | ConversationTasks, cpus: int) -> None:
        """Writes the files that the nodes read."""
        (self.folder / "logs").mkdir(exist_ok=True)
        tokenizer = self.folder / "tokenizer.json"
        shutil.copyfile(work.tokenizer, tokenizer)
        fields = to_jsonable_python(work._replace(tokenizer=tokenizer)._asdict())
        tasks = ArrayTasks(
            kind=type(work).__name__, work=fields, ranks=self.ranks, cpus=cpus, lost_seconds=LOST_SECONDS
        )
        (self.folder / SPECIFICATION).write_text(tasks.model_dump_json())

    def submit(self, task: SlurmTask, cluster: SlurmProfile) -> None:
        for first in range(0, len(self.ranks), ARRAY_SIZE):
            ranks = self.ranks[first : first + ARRAY_SIZE]
            script = self.folder / f"array-{first}.sh"
            program = [
                sys.executable,
                "-m",
                "apertus_model.data.array_task",
                str(self.folder / SPECIFICATION),
                str(first),
            ]
            script.write_text(f"#!/bin/sh\nexec {' '.join(map(shlex.quote, program))}\n")
            logs = self.folder / "logs" / "%A_%a.txt"
            options = slurm.options(cluster, "apertus-tasks", logs, task.cpus, task.memory, task.time_limit)
            job = self.jobs.submit(script, {**options, "array": f"0-{len(ranks) - 1}", "ntasks": 1})
            self.waiting.update({f"{job}_{element}": rank for element, rank in enumerate(ranks)})

    def story(self, name: str, rank: int, state: str) -> str:
        """Why a task ended without a result, as far as its log tells."""
        log = self.folder / "logs" / f"{name}.txt"
        task = f"task {rank} (Slurm job {name}, {state})"
        if not log.exists():
            return (
                f"{task} left neither a result nor a log in {self.folder}. Fix: a scratch folder that the"
                " nodes see at the same path (APERTUS_SCRATCH), if it was not cancelled"
            )
        with log.open(encoding="utf-8", errors="replace") as file:
            lines = deque(file, LOG_LINES)
        return f"{task} ended without a result; its log ends:\n{''.join(lines) or '(empty)'}".rstrip()

    def cancel(self) -> None:
        if problem := self.jobs.cancel():
            print(f"scancel {' '.join(self.jobs.numbers)} failed: {problem}", file=sys.stderr, flush=True)


def _result(folder: Path, rank: int) -> ArrayResult | None:
    """The result of a task, once it and all its files are seen. StageError or SlurmError for a task that
    ended with an error."""
    try:
        result = json.loads(result_file(folder, rank).read_text())
    except FileNotFoundError:
        return None
    if "error" in result:
        raise (SlurmError if result["again"] else StageError)(result["error"])
    files = {name: folder / record["path"] for name, record in result["files"].items()}
    seen = all(
        path.exists() and path.stat().st_size == result["files"][name]["size"] for name, path in files.items()
    )
    return ArrayResult(files, result["counts"]) if seen else None
