"""Tables in a terminal. Each module of this folder makes one family.

Invariants: nothing here decides anything; every number comes from the plan or the store. Text that is not our
markup is printed unchanged: it goes through `escape`, and emoji codes (`:smile:`) are off.
"""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from flows.terminal import empty_table

WIDE = 110  # columns of the narrowest terminal that shows ids
NUMBERS = (  # right-aligned columns
    "steps",
    "tokens",
    "draws",
    "drawn",
    "FLOPs",
    "GPUs",
    "time",
    "GPU-hours",
    "energy",
    "cost",
    "per GPU",
    "total",
    "difference",
    *("weights", "grads", "states", "kept", "working", "output", "gathered", "update"),
    "checkpoint",
    "each",
    "stop",
    "write",
    "every",
    "Young/Daly",
    "written",
    "in all",
    "stored",
    *("requests", "read", "sampled"),
    *("calls", "async", "tensors", "rest", "plan", "of plan"),
    *("from step", "to step", "from token", "to token", "masked 1/k", "by hash"),
)


def make_console(**options: Any) -> Console:
    """A console for names, paths and messages from outside."""
    return Console(emoji=False, **options)


def table(
    title: str,
    caption: str,
    headings: tuple[str, ...],
    rows: list[list[str]],
    *,
    optional: tuple[str, ...] = (),
    width: int | None = None,
) -> Table:
    """A table whose columns keep their width; the last one gets the rest of the terminal. `optional` columns
    are left out if no row has a value, and, in their order, while the table is wider than `width`; the
    caption names the latter."""
    shown = [
        name
        for name in headings
        if name not in optional or any(row[headings.index(name)] not in ("-", "") for row in rows)
    ]
    room, cut = dict(zip(headings, _widths(headings, rows), strict=True)), []
    padding = 1 if width is None or _needed(room, shown, 1) <= width else 0
    for name in (name for name in optional if name in shown):
        if width is not None and _needed(room, shown, padding) > width:
            shown.remove(name)
            cut.append(name)
    caption = "; ".join(part for part in (caption, f"no room for: {', '.join(cut)}" if cut else "") if part)
    found = empty_table(title, shown, numbers=NUMBERS, folded=shown[-1:])
    found.caption, found.caption_justify, found.padding = caption, "left", (0, padding, 0, 0)
    for name, column in zip(shown[:-1], found.columns, strict=False):
        column.min_width = room[name]
    for row in rows:
        found.add_row(*(row[headings.index(name)] for name in shown))
    return found


LONG_WORD = 24  # characters; a longer word of the last column, such as a path, may be broken


def _widths(headings: tuple[str, ...], rows: list[list[str]]) -> list[int]:
    """The width of each column: that of its longest cell, or of the longest word in the last column."""
    cells = [
        [Text.from_markup(cell, emoji=False) for cell in column] for column in zip(*rows, strict=True)
    ] or [[] for _ in headings]
    widths = [
        max(len(name), *(cell.cell_len for cell in column), 0)
        for name, column in zip(headings, cells, strict=True)
    ]
    words = [len(word) for cell in cells[-1] for word in cell.plain.split()]
    return [*widths[:-1], max(len(headings[-1]), min(LONG_WORD, max(words, default=0)))]


def _needed(room: dict[str, int], shown: list[str], padding: int) -> int:
    """Width of a table with an edge, and a gap after each column."""
    return 1 + sum(room[name] + padding + 1 for name in shown)
