"""What a terminal of some width shows."""

from __future__ import annotations

import io

from rich.console import Console

from flows.cli.tables.plan import show_plan
from flows.planning.plan import Plan

ODD = ["[red]x[/red]", ":smile:", "[/]", "a:b", "[bold", "\\\\[red]", ":warning:[link=x]"]


def shown(table: object, width: int) -> str:
    console = Console(width=width, file=io.StringIO(), color_system=None)
    console.print(table)
    return console.file.getvalue()  # type: ignore[attr-defined]


def printed(plan: Plan, width: int, *, terminal: bool = True, details: bool = False) -> list[str]:
    console = Console(width=width, file=io.StringIO(), force_terminal=terminal, color_system=None)
    show_plan(console, plan, details)
    return [line.rstrip() for line in console.file.getvalue().splitlines()]  # type: ignore[attr-defined]
