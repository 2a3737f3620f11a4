"""Units of work: their description by a stage, their computation, and the messages between stage and workers.

Invariants: a unit depends on the job and its key alone, so it does not matter who computes it, or how often;
its files appear in the store complete, and once, through its marker.
"""

import importlib
import traceback
import uuid
from collections.abc import Collection, Generator, Iterable
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from apertus_model.failure import failure_of
from infra.imports import quick_imports
from infra.store import Attempt
from infra.store.documents import Unit
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


def reported(error: Exception) -> Failure:
    """The report of an error, which is printed with its stack unless it is one for users."""
    if not isinstance(error, StageError):
        traceback.print_exc()
    return failure_of(error)


def failure_file(folder: str, name: str) -> str:
    """The path in the store of the error of a worker; `folder` is that of the shares."""
    return f"{folder}/failures/{name}.json"


Span = tuple[int, int]


class Result(NamedTuple):
    files: dict[str, Path]  # by name; removed when they are committed
    data: Any = None  # JSON


class Work(Protocol):
    """The work of a stage. It is cheap to make; what its units share (a model, a tokenizer) is loaded when
    the first unit runs, and stays loaded in that process."""

    @property
    def units(self) -> Collection[str]:
        """The keys of all units, in the order in which they are begun."""

    def run(self, key: str) -> Result:
        """Computes one unit in this process."""


class CommittedUnit:
    """A unit that is in the store, whose marker is read when it is first asked for."""

    def __init__(self, attempt: Attempt, key: str) -> None:
        self._attempt = attempt
        self._key = key

    @cached_property
    def _unit(self) -> Unit:
        return self._attempt.committed_unit(self._key)

    @property
    def data(self) -> Any:
        """The data of the unit, JSON. StoreError when the unit is gone."""
        return self._unit.data

    @cached_property
    def files(self) -> dict[str, Path]:
        """Local paths by name, with checked content. StoreError for a file that is damaged or gone."""
        return self._attempt.unit_files(self._key, self._unit)


def open_work(attempt: Attempt) -> Work:
    with quick_imports():
        stage = importlib.import_module(f"apertus_model.stages.{attempt.job.kind}")
    return stage.Units(attempt)


def commit_result(work: Work, key: str, attempt: Attempt) -> None:
    """Computes a unit and commits it. An error counts for nothing if another worker was quicker: the unit's
    inputs may then have been removed."""
    try:
        result = work.run(key)
    except Exception:
        if attempt.unit(key) is None:
            raise
        return
    attempt.commit_unit(key, files=result.files, data=result.data)
    for path in result.files.values():
        path.unlink()


def run_share(job: Job, keys: Iterable[str]) -> Generator[str, None, None]:
    """Computes and commits units in this process, in a folder of its own; yields the key of each."""
    name = uuid.uuid4().hex[:8]
    own = job.model_copy(update={"scratch": str(Path(job.scratch) / f"worker-{name}")})
    attempt = Attempt(own, worker=name)
    work = open_work(attempt)
    for key in keys:
        if attempt.unit(key) is None:
            commit_result(work, key, attempt)
        yield key


def spans(total: int, size: int) -> list[Span]:
    """The consecutive ranges [start, stop) of at most `size` items."""
    return [(start, min(start + size, total)) for start in range(0, total, size)]


def units_of(name: str, total: int, size: int) -> dict[str, Span]:
    """The ranges of at most `size` items, by the keys of their units. A key contains its range, so that units
    of other sizes have other keys."""
    return {f"{name}-{start:08d}-{stop:08d}": (start, stop) for start, stop in spans(total, size)}
