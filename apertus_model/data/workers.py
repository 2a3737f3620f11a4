"""The processes that run the tasks of a stage.

Invariant: no worker outlives its stage: each holds the read end of a pipe whose write end only the stage has,
and exits when it closes. (datatrove's own process pool starts a manager process that survives a `kill -9` of
its parent, so tasks are handed out here.)
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from multiprocessing.connection import Connection
from typing import Protocol, TypeVar

Result = TypeVar("Result", covariant=True)


class Tasks(Protocol[Result]):
    """Work that is cut into tasks. Picklable."""

    def run(self, rank: int) -> Result:
        """Runs one task in this process."""


def run_tasks(work: Tasks[Result], ranks: list[int], workers: int) -> Iterator[tuple[int, Result]]:
    """Runs tasks and yields each with its rank when it is done: in this process for one worker, else in
    `workers` processes.

    The first error of a task is raised here; the other workers are stopped.
    """
    if workers == 1 or len(ranks) <= 1:
        for rank in ranks:
            yield rank, work.run(rank)
        return
    # Not forked: threads of this process (storage clients, tokenisers) would leave locks behind in the
    # children.
    context = multiprocessing.get_context("spawn")
    alive, lifeline = context.Pipe(duplex=False)
    pool = ProcessPoolExecutor(
        min(workers, len(ranks)), mp_context=context, initializer=_begin_worker, initargs=(alive,)
    )
    try:
        running: dict[Future[Result], int] = {pool.submit(work.run, rank): rank for rank in ranks}
        for future in as_completed(running):
            yield running[future], future.result()
        pool.shutdown()
    finally:
        lifeline.close()
        pool.shutdown(cancel_futures=True)
        alive.close()


def _begin_worker(alive: Connection) -> None:
    """One tokeniser thread per worker, and a watch on the stage."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    threading.Thread(target=_leave_with_stage, args=(alive,), daemon=True).start()


def _leave_with_stage(alive: Connection) -> None:
    with contextlib.suppress(EOFError, OSError):
        alive.recv_bytes()
    os._exit(1)
