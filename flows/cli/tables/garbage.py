"""Tables of `apertus gc` and `apertus runs`.

Invariant: a removal surveys the store again, so that a run that began since keeps its artifacts.
"""

from __future__ import annotations

import re
from datetime import UTC, datetime
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Table

from flows.format import amount
from infra.store import Artifact, Store, StoreError, runs
from infra.store.maintenance import garbage
from infra.store.maintenance.garbage import Survey, survey
from specs.units import Duration


def seconds_of(kind: type[Duration], text: str) -> float:
    """A time span as seconds. StoreError for a malformed one."""
    try:
        return float(kind.parse(text).seconds)
    except ValueError as error:
        raise StoreError(f"--grace: {error}") from None


def rows_of(found: Survey) -> list[dict[str, Any]]:
    """The items to remove, by kind, stage and reason; the largest first."""
    groups: dict[tuple[str, str, str], dict[str, Any]] = {}
    for item in found.items:
        stage = re.split(r"[/.]", item.name)[0] or item.path.rpartition("/")[2][:8]
        key = (item.kind, stage, item.why)
        row = groups.setdefault(key, {"kind": item.kind, "stage": stage, "why": item.why, "artifacts": 0, "files": 0, "bytes": 0})
        row["artifacts"] += 1
        row["files"] += item.count
        row["bytes"] += item.bytes
    return sorted(groups.values(), key=lambda row: (-row["bytes"], row["kind"], row["stage"]))


def show(console: Console, store: Store, found: Survey, grace: str, *, removing: bool) -> None:
    """The table of items to remove, and what stays and why."""
    rows = rows_of(found)
    if rows:
        table = Table(
            title=f"what no named run reaches in {escape(store.url)}", title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0)
        )
        for heading in ("kind", "stage", "why", "artifacts", "files", "size"):
            table.add_column(heading, justify="right" if heading in ("artifacts", "files", "size") else "left", no_wrap=heading != "why")
        for row in rows:
            numbers = (f"{row['artifacts']:,}", f"{row['files']:,}", f"{amount(row['bytes'])}B")
            table.add_row(row["kind"], escape(row["stage"]), row["why"], *numbers)
        table.add_section()
        count = sum(row["files"] for row in rows)
        table.add_row("[bold]in all[/]", "", "", "", f"{count:,}", f"[bold]{amount(found.freed)}B[/]")
        console.print(table)
    else:
        console.print(f"every file of {escape(store.url)} belongs to a named run, or is younger than {grace}", soft_wrap=True)
    kept = amount(found.bytes - found.freed)
    names = ", ".join(found.runs) or "no run"
    reached = f"{found.reached} artifacts reached by {escape(names)} or by files younger than {grace}"
    console.print(f"{kept}B stay: {reached}", soft_wrap=True)
    if found.live:
        live = f"{len(found.live)} artifacts may be in use or are younger than {grace}"
        console.print(f"{live}; they stay with their lineage")
    for note in found.notes:
        console.print(f"[yellow]note:[/] {escape(note)}", soft_wrap=True)
    if rows and not removing:
        console.print("nothing is removed without --yes; `apertus runs` lists the names, `apertus forget` drops one", style="dim")


def remove(console: Console, store: Store, grace: float, *, quiet: bool = False) -> int:
    """Surveys the store again and removes; returns the bytes freed."""
    found = survey(store, grace=grace)
    with Progress(
        TextColumn("removing"), BarColumn(), TextColumn("{task.fields[name]}", markup=False), console=console, disable=quiet
    ) as progress:
        task = progress.add_task("", total=len(found.items), name="markers")
        freed = garbage.remove(store, found, lambda item: progress.update(task, advance=1, name=f"{item.kind} {item.name}"))
    if not quiet:
        console.print(f"{amount(freed)}B of {len(found.items)} items removed")
    return freed


def to_json(store: Store, found: Survey) -> dict[str, Any]:
    """A survey as plain values."""
    items = [{"path": item.path, "name": item.name, "why": item.why, "files": item.count, "bytes": item.bytes} for item in found.items]
    return {
        "store": store.url,
        "bytes": found.bytes,
        "freed_bytes": found.freed,
        "runs": found.runs,
        "live": found.live,
        "items": items,
        "notes": found.notes,
    }


def run_rows(store: Store) -> list[dict[str, Any]]:
    """The named runs, with their last start and the number of finished parts."""
    rows = []
    for name in runs.names(store):
        stamps = runs.stamps(store, name)
        record = runs.read(store, name, stamps[-1])
        finished = sum(Artifact(store, path, step).complete for path, step in record.parts.values())
        started = datetime.fromtimestamp(record.time, UTC).isoformat(timespec="seconds")
        rows.append({"name": name, "started": started, "records": len(stamps), "parts": len(record.parts), "finished": finished})
    return rows


def runs_table(store: Store, rows: list[dict[str, Any]]) -> Table:
    table = Table(title=f"runs in {escape(store.url)}", title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for heading in ("run", "last started", "records", "finished"):
        table.add_column(heading, justify="right" if heading in ("records", "finished") else "left", no_wrap=True)
    for row in rows:
        table.add_row(f"[bold]{escape(row['name'])}[/]", row["started"], str(row["records"]), f"{row['finished']} of {row['parts']} parts")
    return table
