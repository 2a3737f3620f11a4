"""The tables of `apertus status` and of `apertus runs`: how each named run ended, or its metrics.

Invariant: it only reads; what was not recorded is said to be unknown.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from fnmatch import fnmatchcase

from rich.markup import escape
from rich.table import Table

from flows.format import COLOURS, amount, duration, headline, in_full
from flows.planning.plan import Plan
from flows.stored_part import StoredPart, planned_parts
from flows.terminal import empty_table, table
from infra.store import Artifact, Store, StoreError, runs
from infra.store.writing.lease import holder_of
from specs.errors import did_you_mean

NO_END = "no end was recorded: the run was killed, or was made by a release that recorded none"
WIDE = 110  # columns of the narrowest terminal that shows ids


def status_table(plan: Plan, width: int) -> Table:
    """A table of all parts with their results; a narrow terminal gets no ids, which `--json` has."""
    wide, rows = width >= WIDE, []
    for part in planned_parts(plan).values():
        state, ids = f"[{COLOURS[part.state]}]{part.state}[/]", [part.fingerprint[:8]] * wide
        seconds = "+".join(f"{value:.1f}" for value in part.seconds.values() if part.manifest)
        result = escape(part.step.holder or headline(part.results))
        rows.append([part.name, state, *ids, amount(part.node.steps), amount(part.tokens), seconds, result])
    headings = ("part", "state", *["id"] * wide, "steps", "tokens", "seconds*", "result")
    caption = f"* start-up + compute + storage; store: {escape(plan.store.url)}"
    status = table(f"status of {plan.pipeline.name}", caption, headings, rows)
    names = status.columns[0]
    # names share the rest of the width with the results
    names.no_wrap, names.min_width, names.overflow = False, None, "fold"
    return status


@dataclass
class NamedRun:
    """A named run, as its last record has it."""

    name: str
    outcome: str
    reason: str  # the parts that did not finish, one a line
    started: str  # last start, as ISO 8601 in UTC
    seconds: float | None
    records: int
    parts: int
    finished: int  # number of finished parts
    metrics: dict[str, float]  # those asked for, by `part:metric`


def named_runs(store: Store, metrics: Sequence[str] = ()) -> list[NamedRun]:
    """The named runs of a store, with the metrics that match one of the patterns; the smallest value of the
    first metric comes first. StoreError for a pattern that matches nothing."""
    summaries: list[NamedRun] = []
    known: set[str] = set()
    for name in runs.names(store):
        stamps = runs.stamps(store, name)
        record = runs.read(store, name, stamps[-1])
        end = record.end
        parts = [StoredPart(Artifact(store, *place), part) for part, place in record.parts.items()]
        finished = [part for part in parts if part.artifact.complete]
        numbers = {
            f"{part.name}:{metric}": value
            for part in (finished if metrics else ())
            for metric, value in part.numbers.items()
        }
        known |= numbers.keys()
        started = datetime.fromtimestamp(record.time, UTC).isoformat(timespec="seconds")
        run = NamedRun(
            name,
            "unknown",
            NO_END,
            started,
            None,
            records=len(stamps),
            parts=len(parts),
            finished=len({part.name for part in finished} - {*(end.unfinished if end else ())}),
            metrics={metric: value for metric, value in numbers.items() if _matches(metric, metrics)},
        )
        if end is not None:
            run.outcome, run.reason, run.started, run.seconds = (
                end.outcome,
                end.reason,
                end.started,
                end.seconds,
            )
        elif held := next(filter(None, (holder_of(store, part.path) for part in parts)), None):
            run.outcome, run.reason = "running", f"held by {held}"
        summaries.append(run)
    for pattern in metrics:
        if not any(_matches(metric, [pattern]) for metric in known):
            names = {*known, *(metric.partition(":")[2] for metric in known)}
            raise StoreError(f"no run has a metric '{pattern}'. Fix: {did_you_mean(pattern, names)}")
    if first := next((metric for run in summaries for metric in run.metrics), None):
        summaries.sort(key=lambda run: run.metrics.get(first, math.inf))
    return summaries


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(text, pattern) for text in (name, name.partition(":")[2]) for pattern in patterns)


def runs_table(store: Store, named: list[NamedRun]) -> Table:
    """How each run ended; or, if metrics were asked for, a column for each."""
    columns = list(dict.fromkeys(metric for run in named for metric in run.metrics))
    headings = ("run", "outcome", *(columns or ("last started", "took", "finished", "reason")))
    title, counted = f"runs in {escape(store.url)}", ("took", "finished", *columns)
    listed = empty_table(title, headings, numbers=counted, folded=("reason", *columns))
    for run in named:
        first, *others = run.reason.splitlines() or [""]
        more = f"; and {len(others)} more" if others else ""
        parts = f"{run.finished} of {run.parts} parts"
        ended = (run.started, duration(run.seconds), parts, escape(first) + more)
        values = [in_full(run.metrics[name]) if name in run.metrics else "-" for name in columns]
        outcome = f"[{COLOURS[run.outcome]}]{run.outcome}[/]"
        listed.add_row(f"[bold]{escape(run.name)}[/]", outcome, *(values or ended))
    return listed
