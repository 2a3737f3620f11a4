"""The messages between a stage and its workers."""

from __future__ import annotations

from specs.base import Strict
from specs.errors import StageError
from specs.job import Failure, Job

MOST_LOSSES = 3  # a stage fails when this many workers have ended with the same unit


class Shares(Strict):
    """The work of the workers of one job on a cluster."""

    job: Job
    shares: list[list[str]]  # keys of the units of each worker
    alive: str  # the file in the store that changes while the stage lives
    lost_seconds: float  # a worker ends when `alive` has not changed for this long
    cpus: int  # of each worker


class Committed(Strict):
    """The message of a worker of a local pool that it has committed a unit."""

    unit: str


class WorkerLost(RuntimeError):
    """A unit whose workers end before it is committed. Another attempt may succeed."""


def error_of(failure: Failure) -> Exception:
    """The error of a worker's failure, for its stage to raise."""
    return WorkerLost(failure.message) if failure.again else StageError(failure.message)


def failure_file(folder: str, name: str) -> str:
    """The path in the store of the error of a worker; `folder` is that of the shares."""
    return f"{folder}/failures/{name}.json"
