"""The table of `apertus runs`: how each named run ended, or its metrics beside those of the others.

Invariant: it only reads; what was not recorded is said to be unknown.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
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
    """The named runs of a store, with the metrics that match one of the patterns; then the smallest value of
    the first metric comes first. StoreError for a pattern that matches nothing."""
    rows: list[RunRow] = []
    known: dict[str, None] = {}
    for name in runs.names(store):
        stamps = runs.stamps(store, name)
        record = runs.read(store, name, stamps[-1])
        artifacts = {part: Artifact(store, path, step) for part, (path, step) in record.parts.items()}
        finished = [part for part, artifact in artifacts.items() if artifact.complete]
        outcome, reason, seconds = "unknown", NO_END, None
        started = datetime.fromtimestamp(record.time, UTC).isoformat(timespec="seconds")
        if (end := record.end) is not None:
            outcome, reason, seconds, started = end.outcome, end.reason, end.seconds, end.started
        elif held := [
            holder for artifact in artifacts.values() if (holder := holder_of(store, artifact.path))
        ]:
            outcome, reason = "running", f"held by {held[0]}"
        found: dict[str, float] = {}
        for part in finished if metrics else ():
            for metric, value in flatten(artifacts[part].manifest.metrics).items():
                full = f"{part}:{metric}"
                known |= {full: None, metric: None} if is_number(value) else {}
                if is_number(value) and any(
                    fnmatchcase(one, pattern) for one in (full, metric) for pattern in metrics
                ):
                    found[full] = value
        rows.append(
            {
                "name": name,
                "outcome": outcome,
                "reason": reason,
                "started": started,
                "seconds": seconds,
                "records": len(stamps),
                "parts": len(record.parts),
                "finished": len(finished),
                "metrics": found,
            }
        )
    for pattern in metrics:
        if not any(fnmatchcase(one, pattern) for one in known):
            raise StoreError(f"no run has a metric '{pattern}'. Fix: {did_you_mean(pattern, known)}")
    if first := next((one for row in rows for one in row["metrics"]), None):
        rows.sort(key=lambda row: row["metrics"].get(first, math.inf))
    return rows


def runs_table(store: Store, rows: list[RunRow]) -> Table:
    """How each run ended; or, if metrics were asked for, a column for each."""
    columns = list(dict.fromkeys(name for row in rows for name in row["metrics"]))
    counted = ("took", "finished", *columns)
    headings = ("run", "outcome", *(columns or ("last started", "took", "finished", "reason")))
    table = empty_table(
        f"runs in {escape(store.url)}", headings, numbers=counted, folded=("reason", *columns)
    )
    for row in rows:
        colour = COLOURS.get(row["outcome"], "dim")
        values = [in_full(row["metrics"][name]) if name in row["metrics"] else "-" for name in columns]
        first, *others = row["reason"].splitlines() or [""]
        more = f"; and {len(others)} more" if others else ""
        parts = f"{row['finished']} of {row['parts']} parts"
        ended = (row["started"], duration(row["seconds"]), parts, escape(first) + more)
        table.add_row(
            f"[bold]{escape(row['name'])}[/]",
            f"[{colour}]{row['outcome']}[/]",
            *(values or ended),
        )
    return table
