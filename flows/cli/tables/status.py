"""The table of `apertus status`."""

from __future__ import annotations

from typing import Any, TypedDict

from rich.markup import escape
from rich.table import Table

from flows.cli.tables import WIDE, table
from flows.format import amount, headline
from flows.planning.plan import Plan


class StatusRow(TypedDict):
    """A part as `apertus status` shows it."""

    name: str
    kind: str
    state: str
    reason: str
    holder: str  # of the lease, if another run holds it
    fingerprint: str
    path: str | None  # None before anything is stored
    steps: int
    tokens: int
    seconds: dict[str, float] | None
    metrics: dict[str, Any] | None  # None, like `created`, until the part is finished
    created: str | None


def status_table(plan: Plan, width: int) -> Table:
    """A table of all parts with their results; a narrow terminal gets no ids, which `--json` has."""
    rows = []
    for row in status_rows(plan):
        seconds = row["seconds"] or {}
        times = "+".join(
            f"{seconds[name]:.1f}" for name in ("startup", "compute", "storage") if name in seconds
        )
        colour = {"finished": "green", "interrupted": "yellow", "gate failed": "red"}.get(
            row["state"], "cyan"
        )
        numbers = (amount(row["steps"]), amount(row["tokens"]))
        result = escape(row["holder"] or headline(row["metrics"] or {}))
        name = [
            row["name"],
            f"[{colour}]{row['state']}[/]",
            *([row["fingerprint"][:8]] if width >= WIDE else []),
        ]
        rows.append([*name, *numbers, times, result])
    headings = ("part", "state", *(["id"] if width >= WIDE else []), "steps", "tokens", "seconds*", "result")
    caption = f"* start-up + compute + storage; store: {escape(plan.store.url)}"
    found = table(f"status of {plan.pipeline.name}", caption, headings, rows)
    names = found.columns[0]
    # names share the rest of the width with the results
    names.no_wrap, names.min_width, names.overflow = False, None, "fold"
    return found


def status_rows(plan: Plan) -> list[StatusRow]:
    """The status as plain values."""
    rows: list[StatusRow] = []
    for name, step in plan.steps.items():
        manifest = step.node.artifact(plan.store).manifest if step.action == "reuse" else None
        state = (
            "finished" if manifest else "held" if step.holder else "interrupted" if step.stored else "not run"
        )
        rows.append(
            {
                "name": name,
                "kind": step.node.kind,
                "state": "gate failed" if step.gate_failures else state,
                "reason": step.reason,
                "holder": step.holder,
                "fingerprint": step.node.fingerprint,
                "path": step.node.path if step.stored else None,
                "steps": step.node.steps,
                "tokens": step.node.tokens
                or (int(manifest.metrics.get("tokens", 0)) if manifest and step.node.kind == "corpus" else 0),
                "seconds": manifest.seconds.model_dump() if manifest and manifest.seconds else None,
                "metrics": manifest.metrics if manifest else None,
                "created": manifest.created if manifest else None,
            }
        )
    return rows
