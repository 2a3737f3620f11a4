"""Tables of `apertus gc`.

Invariant: a removal surveys the store again, so that a run that has begun since then keeps its artifacts.
"""

import re
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn

from flows.format import amount
from flows.terminal import empty_table
from infra.store import Store, StoreError
from infra.store.maintenance.garbage import GarbageItem, Survey, survey
from infra.store.maintenance.garbage import remove as remove_garbage
from specs.errors import counted
from specs.units import Duration


def seconds_of(text: str) -> float:
    """A time span as seconds. StoreError for a malformed one."""
    try:
        return float(Duration.parse(text).seconds)
    except ValueError as error:
        raise StoreError(f"--grace: {error}") from None


def _groups(garbage: Survey) -> list[tuple[tuple[str, str, str], list[GarbageItem]]]:
    """The items to remove, by kind, stage and reason; the largest first."""
    groups: dict[tuple[str, str, str], list[GarbageItem]] = {}
    for item in garbage.items:
        stage = re.split(r"[/.]", item.name)[0] or item.path.rpartition("/")[2][:8]
        groups.setdefault((item.kind, stage, item.why), []).append(item)
    return sorted(groups.items(), key=lambda pair: (-_bytes(pair[1]), pair[0]))


def _bytes(items: list[GarbageItem]) -> int:
    return sum(item.bytes for item in items)


def show_garbage(console: Console, store: Store, garbage: Survey, grace: str, *, removing: bool) -> None:
    """Prints a table of the items to remove, and what stays and why."""
    if garbage.items:
        columns = ("artifacts", "files", "size")
        title = f"what no named run reaches in {escape(store.url)}"
        table = empty_table(title, ("kind", "stage", "why", *columns), numbers=columns, folded=("why",))
        for (kind, stage, why), items in _groups(garbage):
            files = sum(item.count for item in items)
            numbers = (f"{len(items):,}", f"{files:,}", f"{amount(_bytes(items))}B")
            table.add_row(kind, escape(stage), why, *numbers)
        table.add_section()
        files = sum(item.count for item in garbage.items)
        table.add_row("[bold]in all[/]", "", "", "", f"{files:,}", f"[bold]{amount(garbage.freed)}B[/]")
        console.print(table)
    else:
        every = f"every file of {escape(store.url)} belongs to a named run, or is younger than {grace}"
        console.print(every, soft_wrap=True)
    kept = f"{amount(garbage.bytes - garbage.freed)}B stay: {counted(garbage.reached, 'artifact')} reached by"
    names = escape(", ".join(garbage.runs) or "no run")
    console.print(f"{kept} {names} or by files younger than {grace}", soft_wrap=True)
    if garbage.live:
        live = f"{counted(len(garbage.live), 'artifact')} may be in use or younger than {grace}"
        console.print(f"{live}: kept with the lineage")
    for note in garbage.notes:
        console.print(f"[yellow]note:[/] {escape(note)}", soft_wrap=True)
    if garbage.items and not removing:
        hint = "nothing is removed without --yes; `apertus runs` lists the names, `apertus forget` drops one"
        console.print(hint, style="dim")


def remove(console: Console, store: Store, grace: float, *, quiet: bool = False) -> int:
    """Surveys the store again and removes the items; returns the bytes freed."""
    garbage = survey(store, grace=grace)
    columns = TextColumn("removing"), BarColumn(), TextColumn("{task.fields[name]}", markup=False)
    with Progress(*columns, console=console, disable=quiet) as progress:
        task = progress.add_task("", total=len(garbage.items), name="markers")
        freed = remove_garbage(
            store, garbage, lambda item: progress.update(task, advance=1, name=f"{item.kind} {item.name}")
        )
    if not quiet:
        console.print(f"{amount(freed)}B of {counted(len(garbage.items), 'item')} removed")
    return freed


def garbage_json(store: Store, garbage: Survey) -> dict[str, Any]:
    items = [
        {"path": item.path, "name": item.name, "why": item.why, "files": item.count, "bytes": item.bytes}
        for item in garbage.items
    ]
    return {
        "store": store.url,
        "bytes": garbage.bytes,
        "freed_bytes": garbage.freed,
        "runs": garbage.runs,
        "live": garbage.live,
        "items": items,
        "notes": garbage.notes,
    }
