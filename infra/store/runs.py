"""Records which artifacts belong to a named run.

A run has the name of its pipeline; `runs/<name>/` has a record of every start, one whenever it became known
what an `@best:` or a selection means, and one of the end. The name stands for the last record. `apertus gc`
keeps what a named run refers to, and all that this was made from.

Invariants: a record is written before anything else of its run. A later record sorts after an earlier one,
whatever the clocks of their writers say. A record that cannot be read is an error, never an empty one.
"""

import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

from infra.store.documents import RunDocument, RunEnd, RunPart
from infra.store.store import PROTECTED, Store, StoreError
from specs.foreign import ForeignError, checked

FOLDER = "runs"
TIME = "%Y%m%dT%H%M%S.%fZ"


@dataclass(frozen=True)
class RunRecord:
    """One record of a run. `parts`: the place in the store and, for a trajectory, the step, by name of the
    part; `spec`: the resolved recipe; `end`: how the run ended, if it had by then."""

    run: str
    stamp: str
    parts: dict[str, tuple[str, int | None]]
    spec: dict[str, Any]
    end: RunEnd | None = None

    @property
    def path(self) -> str:
        return f"{FOLDER}/{self.run}/{self.stamp}.json"

    @property
    def time(self) -> float:
        """When the record was written, in unix seconds; 0 if its name does not tell."""
        when = _time(self.stamp)
        return when.timestamp() if when else 0.0


def _time(stamp: str) -> datetime | None:
    try:
        return datetime.strptime(stamp.split("-")[0], TIME).replace(tzinfo=UTC)
    except ValueError:
        return None


def next_stamp(store: Store, run: str, now: datetime | None = None) -> str:
    """The name of a new record: the time `now`, or just after the last record, whose clock may be ahead."""
    now = now or datetime.now(UTC)
    times = [when for stamp in stamps(store, run)[-1:] if (when := _time(stamp)) is not None]
    when = max([now, *(last + timedelta(microseconds=1) for last in times)])
    return f"{when.strftime(TIME)}-{uuid.uuid4().hex[:8]}"


def names(store: Store) -> list[str]:
    """The named runs of a store."""
    return [name for name in store.names(FOLDER) if stamps(store, name)]


def stamps(store: Store, run: str) -> list[str]:
    """The records of a run, the oldest first."""
    return [name.removesuffix(".json") for name in store.names(f"{FOLDER}/{run}") if name.endswith(".json")]


def _stamps(store: Store, run: str) -> list[str]:
    """The records of a run, the oldest first. StoreError when there is no such run."""
    if written := stamps(store, run):
        return written
    there = ", ".join(names(store)) or "none"
    raise StoreError(f"there is no run '{run}' in the store {store.url}; there are {there}")


def read(store: Store, run: str, stamp: str) -> RunRecord:
    """Reads a record. StoreError when it is damaged."""
    path = f"{FOLDER}/{run}/{stamp}.json"
    try:
        stored = checked(RunDocument, store.read_json(path))
    except ForeignError as error:
        fix = f"remove it, or forget the run '{run}'"
        raise StoreError(f"{store.where(path)} is not the record of a run: {error}; {fix}") from error
    parts = {name: (part.path, part.step) for name, part in stored.parts.items()}
    return RunRecord(run, stamp, parts, stored.spec or {}, stored.end)


def write(
    store: Store,
    run: str,
    parts: Mapping[str, tuple[str, int | None]],
    spec: dict[str, Any],
    end: RunEnd | None = None,
) -> None:
    """Records a start of a run, or its end; `parts`, `spec` and `end` as in `RunRecord`."""
    document = RunDocument(
        parts={name: RunPart(path=path, step=step) for name, (path, step) in parts.items()}, spec=spec
    )
    if end is not None:
        document = document.model_copy(update={"end": end})
    store.write_document(f"{FOLDER}/{run}/{next_stamp(store, run)}.json", document)


def protected_mark(path: str, step: int | None) -> str:
    """The place of the mark, outside the artifact, that a part of a protected stage has finished."""
    return f"{PROTECTED}/{path.replace('/', '-')}{'' if step is None else f'-{step}'}.json"


def last(store: Store, run: str) -> RunRecord:
    """The record that a name stands for. StoreError when there is no such run."""
    return read(store, run, _stamps(store, run)[-1])


def forget(store: Store, run: str) -> int:
    """Drops the name of a run, not its artifacts; returns the number of records. StoreError without it."""
    written = _stamps(store, run)
    for stamp in written:  # the last record goes last: until then the name stands for it
        store.remove(f"{FOLDER}/{run}/{stamp}.json")
    store.remove(f"{FOLDER}/{run}")
    return len(written)
