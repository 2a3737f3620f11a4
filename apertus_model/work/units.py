"""Units of work: what a stage states of them, and how one is computed and committed.

Invariants: a unit depends on the job and its key alone, so it does not matter who computes it, or how often;
its files appear in the store whole, and once, by its marker.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from infra.imports import quick_imports
from infra.store import Attempt
from infra.store.documents import Unit
from specs.job import Job

Span = tuple[int, int]


class Result(NamedTuple):
    """What a unit computed."""

    files: dict[str, Path]  # by name; removed when they are committed
    data: Any = None  # JSON


class Work(Protocol):
    """The work of a stage. Making one is cheap; what its units share (a model, a tokenizer) is loaded when
    the first of them runs, and stays loaded in that process."""

    @property
    def keys(self) -> Sequence[str]:
        """Of all units, in the order in which they are begun."""

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
        """JSON. StoreError when the unit is gone."""
        return self._unit.data

    @cached_property
    def files(self) -> dict[str, Path]:
        """Local paths, content checked. StoreError for a file that is damaged or gone."""
        return self._attempt.unit_files(self._key, self._unit)


def open_work(job: Job, attempt: Attempt) -> Work:
    """The work of a job, in a worker."""
    with quick_imports():
        stage = importlib.import_module(f"apertus_model.stages.{job.kind}")
    work: Work = stage.work_of(job, attempt)
    return work


def commit_result(work: Work, key: str, attempt: Attempt) -> Unit:
    """Computes a unit and commits it. Where another worker was quicker, which may have let what the unit
    reads be removed, it is that one's."""
    try:
        result = work.run(key)
    except Exception:
        if (unit := attempt.unit(key)) is not None:
            return unit
        raise
    unit = attempt.commit_unit(key, files=result.files, data=result.data)
    for path in result.files.values():
        path.unlink()
    return unit


def spans(total: int, size: int) -> list[Span]:
    """[start, stop) of consecutive ranges of at most `size` items."""
    return [(start, min(start + size, total)) for start in range(0, total, size)]


def unit_key(name: str, span: Span) -> str:
    """Key of the unit of a range, so that units of other sizes have other keys."""
    return f"{name}-{span[0]:08d}-{span[1]:08d}"


def units_of(name: str, total: int, size: int) -> dict[str, Span]:
    """The ranges of at most `size` items, by the keys of their units."""
    return {unit_key(name, span): span for span in spans(total, size)}
