"""Tables of `apertus gc`.

Invariant: a removal surveys the store again, so that a run that has begun since then keeps its artifacts.
"""

from __future__ import annotations

import re
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn

from flows.format import amount
from flows.terminal import empty_table
from infra.store import Store, StoreError
from infra.store.maintenance import garbage
from infra.store.maintenance.garbage import GarbageItem, Survey, survey
from specs.errors import counted
from specs.units import Duration


def seconds_of(kind: type[Duration], text: str) -> float:
    """A time span as seconds. StoreError for a malformed one."""
    try:
        return float(kind.parse(text).seconds)
    except ValueError as error:
        raise StoreError(f"--grace: {error}") from None


def _groups(found: Survey) -> list[tuple[tuple[str, str, str], list[GarbageItem]]]:
    """The items to remove, by kind, stage and reason; the largest first."""
    groups: dict[tuple[str, str, str], list[GarbageItem]] = {}
    for item in found.items:
        stage = re.split(r"[/.]", item.name)[0] or item.path.rpartition("/")[2][:8]
        groups.setdefault((item.kind, stage, item.why), []).append(item)
    return sorted(groups.items(), key=lambda pair: (-_bytes(pair[1]), pair[0]))


def _bytes(items: list[GarbageItem]) -> int:
    return sum(item.bytes for item in items)


def show(console: Console, store: Store, found: Survey, grace: str, *, removing: bool) -> None:
    """Prints a table of the items to remove, and what stays and why."""
    if found.items:
        columns = ("artifacts", "files", "size")
        title = f"what no named run reaches in {escape(store.url)}"
        table = empty_table(title, ("kind", "stage", "why", *columns), numbers=columns, folded=("why",))
        for (kind, stage, why), items in _groups(found):
            files = sum(item.count for item in items)
            numbers = (f"{len(items):,}", f"{files:,}", f"{amount(_bytes(items))}B")
            table.add_row(kind, escape(stage), why, *numbers)
        table.add_section()
        files = sum(item.count for item in found.items)
        table.add_row("[bold]in all[/]", "", "", "", f"{files:,}", f"[bold]{amount(found.freed)}B[/]")
        console.print(table)
    else:
        console.print(
            f"every file of {escape(store.url)} belongs to a named run, or is younger than {grace}",
            soft_wrap=True,
        )
    kept = amount(found.bytes - found.freed)
    names = ", ".join(found.runs) or "no run"
    reached = (
        f"{counted(found.reached, 'artifact')} reached by {escape(names)} or by files younger than {grace}"
    )
    console.print(f"{kept}B stay: {reached}", soft_wrap=True)
    if found.live:
        live = f"{counted(len(found.live), 'artifact')} may be in use or younger than {grace}"
        console.print(f"{live}: kept with the lineage")
    for note in found.notes:
        console.print(f"[yellow]note:[/] {escape(note)}", soft_wrap=True)
    if found.items and not removing:
        console.print(
            "nothing is removed without --yes; `apertus runs` lists the names, `apertus forget` drops one",
            style="dim",
        )


def remove(console: Console, store: Store, grace: float, *, quiet: bool = False) -> int:
    """Surveys the store again and removes the items found; returns the bytes freed."""
    found = survey(store, grace=grace)
    with Progress(
        TextColumn("removing"),
        BarColumn(),
        TextColumn("{task.fields[name]}", markup=False),
        console=console,
        disable=quiet,
    ) as progress:
        task = progress.add_task("", total=len(found.items), name="markers")
        freed = garbage.remove(
            store, found, lambda item: progress.update(task, advance=1, name=f"{item.kind} {item.name}")
        )
    if not quiet:
        console.print(f"{amount(freed)}B of {counted(len(found.items), 'item')} removed")
    return freed


def to_json(store: Store, found: Survey) -> dict[str, Any]:
    """A survey as plain values."""
    items = [
        {"path": item.path, "name": item.name, "why": item.why, "files": item.count, "bytes": item.bytes}
        for item in found.items
    ]
    return {
        "store": store.url,
        "bytes": found.bytes,
        "freed_bytes": found.freed,
        "runs": found.runs,
        "live": found.live,
        "items": items,
        "notes": found.notes,
    }
