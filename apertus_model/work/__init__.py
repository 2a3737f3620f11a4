"""Work that is cut into independent, restartable units, and the workers that share them: processes on this
machine, a Slurm job array, or actors of a Ray cluster.

A stage module whose work is cut into units has a class `Units`, which is its `Work` and is made from the
attempt, by a worker too. The stage calls `run_units` and reads the results. A new kind needs nothing else.

Invariant: a unit that is in the store does not run again. Workers commit their units themselves, so a worker
that dies loses only the unit that it has begun.
"""

import contextlib
from collections.abc import Callable, Generator

from apertus_model.progress import Progress, UnitProgress
from apertus_model.stop import StopSignal
from apertus_model.work.actors import run_on_ray
from apertus_model.work.cluster import JobArrays, run_on_cluster
from apertus_model.work.local import run_in_processes, workers_here
from apertus_model.work.units import CommittedUnit, Result, Work, commit_result
from infra.store import Attempt

__all__ = ["CommittedUnit", "Result", "Work", "run_units"]


def run_units(
    work: Work,
    attempt: Attempt,
    stop: StopSignal,
    progress: Progress,
    *,
    processes: int = 1,
    here: bool = False,
    on_commit: Callable[[str], None] = lambda key: None,
) -> list[CommittedUnit]:
    """Runs the units that are not in the store. Returns all units, in the order of `work.units`. StageError
    when a unit raised it; WorkerLost when its workers died again and again; Stopped when `stop` was requested
    while units ran on a cluster. `processes`: workers on this machine, if neither launch settings nor GPUs
    determine them; `here`: runs in this process; `on_commit`: is called for each stored unit."""
    keys = list(work.units)
    pending = [key for key in keys if attempt.unit(key) is None]
    for key in set(keys) - set(pending):
        on_commit(key)
    advance = UnitProgress(progress, len(keys), len(pending))
    executed = _run_here(work, pending, attempt)
    if not here:
        executed = _execute(work, pending, attempt, stop, advance, processes)
    with contextlib.closing(executed) as finished:
        for key in finished:
            attempt.committed_unit(key)
            on_commit(key)
            advance.one_more()
    return [CommittedUnit(attempt, key) for key in keys]


def _execute(
    work: Work, pending: list[str], attempt: Attempt, stop: StopSignal, progress: UnitProgress, processes: int
) -> Generator[str, None, None]:
    """Yields the key of each unit once it is committed. All workers end when the generator is closed."""
    job = attempt.job
    if job.launch.executor == "slurm":
        yield from run_on_cluster(JobArrays(job), pending, attempt, stop, progress)
    elif job.launch.executor == "ray":
        yield from run_on_ray(job, pending, stop, progress)
    elif (workers := min(workers_here(job, processes), len(pending))) > 1:
        yield from run_in_processes(job, pending, workers)
    else:
        yield from _run_here(work, pending, attempt)


def _run_here(work: Work, pending: list[str], attempt: Attempt) -> Generator[str, None, None]:
    for key in pending:
        commit_result(work, key, attempt)
        yield key
