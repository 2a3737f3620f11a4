"""The table of `apertus runs`: how each named run ended, or its metrics beside those of the others.

Invariant: it only reads; what was not recorded is said to be unknown.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from fnmatch import fnmatchcase
from typing import TypedDict

from rich.markup import escape
from rich.table import Table

from flows.cli.tables.estimate import duration
from flows.format import in_full, is_number
from flows.terminal import empty_table
from infra.store import Artifact, Store, StoreError, runs
from infra.store.writing.lease import holder_of
from specs.base import flatten
from specs.errors import did_you_mean

COLOURS = {"finished": "green", "failed": "red", "interrupted": "yellow", "running": "cyan"}
NO_END = "no end was recorded: the run was killed, or was made by a release that recorded none"


class RunRow(TypedDict):
    """A named run."""

    name: str
    outcome: str
    reason: str  # the parts that did not finish, one a line
    started: str  # last start, as ISO 8601 in UTC
    seconds: float | None
    records: int
    parts: int
    finished: int  # number of finished parts
    metrics: dict[str, float]  # those asked for, by `part:metric`


def run_rows(store: Store, metrics: Sequence[str] = ()) -> list[RunRow]:
    """The named runs of a store, with the metrics that match one of the patterns; the smallest value of the
    first metric comes first. StoreError for a pattern that matches nothing."""
    rows: list[RunRow] = []
    known: set[str] = set()
    for name in runs.names(store):
        stamps = runs.stamps(store, name)
        record = runs.read(store, name, stamps[-1])
        artifacts = {part: Artifact(store, path, step) for part, (path, step) in record.parts.items()}
        complete = {part: artifact for part, artifact in artifacts.items() if artifact.complete}
        numbers = _numbers(complete) if metrics else {}
        known |= numbers.keys()
        started = datetime.fromtimestamp(record.time, UTC).isoformat(timespec="seconds")
        row: RunRow = {
            "name": name,
            "outcome": "unknown",
            "reason": NO_END,
            "started": started,
            "seconds": None,
            "records": len(stamps),
            "parts": len(artifacts),
            "finished": len(complete.keys() - set(record.end.unfinished if record.end else ())),
            "metrics": {one: value for one, value in numbers.items() if _matches(one, metrics)},
        }
        if (end := record.end) is not None:
            row["outcome"], row["reason"] = end.outcome, end.reason
            row["started"], row["seconds"] = end.started, end.seconds
        elif held := next(filter(None, (holder_of(store, one.path) for one in artifacts.values())), None):
            row["outcome"], row["reason"] = "running", f"held by {held}"
        rows.append(row)
    for pattern in metrics:
        if not any(_matches(one, [pattern]) for one in known):
            names = {*known, *(one.partition(":")[2] for one in known)}
            raise StoreError(f"no run has a metric '{pattern}'. Fix: {did_you_mean(pattern, names)}")
    if first := next((one for row in rows for one in row["metrics"]), None):
        rows.sort(key=lambda row: row["metrics"].get(first, math.inf))
    return rows


def _numbers(parts: Mapping[str, Artifact]) -> dict[str, float]:
    """The metrics of finished parts by `part:metric`."""
    return {
        f"{part}:{metric}": value
        for part, artifact in parts.items()
        for metric, value in flatten(artifact.manifest.metrics).items()
        if is_number(value)
    }


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(one, pattern) for one in (name, name.partition(":")[2]) for pattern in patterns)


def runs_table(store: Store, rows: list[RunRow]) -> Table:
    """How each run ended; or, if metrics were asked for, a column for each."""
    columns = list(dict.fromkeys(name for row in rows for name in row["metrics"]))
    headings = ("run", "outcome", *(columns or ("last started", "took", "finished", "reason")))
    title, counted = f"runs in {escape(store.url)}", ("took", "finished", *columns)
    table = empty_table(title, headings, numbers=counted, folded=("reason", *columns))
    for row in rows:
        first, *others = row["reason"].splitlines() or [""]
        more = f"; and {len(others)} more" if others else ""
        parts = f"{row['finished']} of {row['parts']} parts"
        ended = (row["started"], duration(row["seconds"]), parts, escape(first) + more)
        values = [in_full(row["metrics"][name]) if name in row["metrics"] else "-" for name in columns]
        outcome = f"[{COLOURS.get(row['outcome'], 'dim')}]{row['outcome']}[/]"
        table.add_row(f"[bold]{escape(row['name'])}[/]", outcome, *(values or ended))
    return table
