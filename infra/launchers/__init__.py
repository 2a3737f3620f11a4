"""Launchers, which start the process of a stage on this machine or on a cluster.

A launcher has `run`, which blocks until no process of the attempt is left, and `stop`, which asks the attempt
to end: a training stage commits a checkpoint first. The profile chooses the launcher; a recipe does not know
which one it is.

Invariants: no launcher judges success; the store does. An attempt that a cluster ended (time limit,
preemption, a node that died) is distinguished from one that failed: the caller submits it again, and it
resumes from what is committed.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

from infra.launchers.local import Ended, Process
from infra.launchers.ray_job import stage_needs
from infra.launchers.ray_process import RayProcess
from infra.launchers.slurm_job import SlurmJob
from infra.ray_cluster import ClusterNeeds, worker_needs
from infra.slurm import SlurmError
from specs.job import Job, ProgressRow
from specs.launch import Launch
from specs.profiles import Profile

__all__ = ["REFUSED", "Ended", "Launched", "launch_job", "needs_of_ray"]

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
    launcher = _launcher(launch, profile, job.gpus, distributed=distributed, in_units=in_units)
    if launcher == "slurm":
        return SlurmJob(job, launch, profile, distributed=distributed, exclude=exclude)
    if launcher == "ray":
        return RayProcess(job, launch, distributed=distributed, in_units=in_units, exclude=[*exclude])
    return Process(job, launch, distributed=distributed)


def needs_of_ray(
    launch: Launch, profile: Profile, gpus: int, *, distributed: bool, in_units: bool
) -> ClusterNeeds | None:
    """What an attempt that `launch_job` makes of the same, or a worker of it, asks of a Ray cluster; None if
    it does not use one. `gpus`: those of the job."""
    if in_units and launch.executor == "ray":
        return worker_needs(launch, profile, gpus)
    if _launcher(launch, profile, gpus, distributed=distributed, in_units=in_units) == "ray":
        return stage_needs(launch, profile, gpus, distributed=distributed, in_units=in_units)
    return None


def _launcher(launch: Launch, profile: Profile, gpus: int, *, distributed: bool, in_units: bool) -> str:
    """The launcher of a job: that of the profile if it uses GPUs, unless it submits its workers itself."""
    submits = in_units and launch.executor in ("slurm", "ray")
    on_cluster = distributed or gpus or profile.stages == "all"
    return profile.launcher if on_cluster and not submits else "local"
