"""Launchers, which start the process of a stage on this machine or on a cluster.

A launcher has `run`, which blocks until no process of the attempt is left, and `stop`, which asks the attempt
to end: a training stage commits a checkpoint first. The profile chooses the launcher; a recipe does not know
which one it is.

Invariants: no launcher judges success; the store does. An attempt that a cluster ended (time limit,
preemption, a node that died) is distinguished from one that failed: the caller submits it again, and it
resumes from what is committed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from infra.launchers.local import Ended, Process
from infra.launchers.ray_process import RayProcess
from infra.launchers.slurm_job import SlurmJob
from infra.slurm import SlurmError
from specs.job import Job, ProgressRow
from specs.launch import Launch
from specs.profiles import Profile

__all__ = ["REFUSED", "Ended", "Launched", "launch_job"]

REFUSED = (SlurmError,)  # the cluster did not accept an attempt: another one may succeed


class Launched(Protocol):
    """An attempt at a part. `run` calls back with every line of output and every row of progress; `on_start`
    is told the inode of the pipe that is the standard input of a stage on this machine. `run` raises one of
    `REFUSED` when a cluster does not accept the attempt."""

    def run(
        self,
        on_line: Callable[[str], None],
        on_progress: Callable[[ProgressRow], None],
        on_start: Callable[[int], None] = ...,
    ) -> Ended: ...
    def stop(self, reason: str) -> None: ...


def launch_job(
    job: Job,
    launch: Launch,
    profile: Profile,
    *,
    distributed: bool,
    in_units: bool = False,
    exclude: Sequence[str] = (),
) -> Launched:
    """An attempt at a job, not started yet. `distributed`: the job runs on the training engine; `in_units`:
    workers, which the job may submit itself, share its units; `exclude`: nodes that failed before."""
    submits = in_units and launch.executor in ("slurm", "ray")
    if profile.launcher == "local" or submits or not (distributed or job.gpus or profile.stages == "all"):
        return Process(job, launch, distributed=distributed)
    if profile.launcher == "slurm":
        return SlurmJob(job, launch, profile, distributed=distributed, exclude=exclude)
    workers = 1
    if in_units and job.gpus:  # by default as many as a node has room for, as on one machine
        workers = launch.workers_of_node(profile.gpus_per_node, job.gpus)
    return RayProcess(job, launch, distributed=distributed, workers=workers, exclude=[*exclude])
