"""What a stage and its workers tell each other."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

from specs.errors import StageError
from specs.job import Failure, Job

MOST_LOSSES = 3  # workers that a unit may take with it


class Shares(BaseModel):
    """What the workers of one job on a cluster have to do."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    job: Job
    shares: list[list[str]]  # keys of the units of each worker
    alive: str  # the file in the store that changes while the stage lives
    lost_seconds: float  # a worker ends when it has not changed for this long
    cpus: int  # of each worker


class Committed(BaseModel):
    """What a worker of a local pool says of a unit."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    unit: str


class WorkerLost(RuntimeError):
    """A unit whose workers end before it is committed. Another attempt may succeed."""


def error_of(failure: Failure) -> Exception:
    """What a worker failed with, for its stage to raise."""
    return WorkerLost(failure.message) if failure.again else StageError(failure.message)


def failure_file(folder: str, name: str) -> str:
    """Path in the store of the error of a worker; `folder`: of the shares."""
    return f"{folder}/failures/{name}.json"
