"""The table of `apertus status`."""

from __future__ import annotations

from rich.markup import escape
from rich.table import Table

from flows.format import COLOURS, amount, headline
from flows.planning.plan import Plan
from flows.stored_part import planned_parts
from flows.terminal import table

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
