"""Tables and bars in a terminal.

Invariants: nothing here decides anything. Text that is not our markup is printed unchanged: it goes through
`escape`, and emoji codes (`:smile:`) are off.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from rich.progress import Progress

# what a column of numbers has in its cells: 1.23k, 57.2 GB, +4.8%, 6.74e24, <= 1.2T
NUMBER = re.compile(r"-|(<= )?[+-]?[\d.,]+(e-?\d+)?([%kMBTPEZY]| [A-Za-z]+)?")
LONG_WORD = 24  # characters; a longer word of the last column, such as a path, may be broken


def make_console(**options: Any) -> Console:
    """A console for names, paths and messages from outside."""
    return Console(emoji=False, **options)


def bytes_progress(console: Console, work: str, *, quiet: bool = False) -> Progress:
    """A bar for work on bytes, which a terminal shows while the work lasts."""
    from rich import progress as bars  # few commands need it

    columns = (
        *(bars.TextColumn(work), bars.BarColumn(), bars.DownloadColumn()),
        *(bars.TransferSpeedColumn(), bars.TimeRemainingColumn()),
    )
    return bars.Progress(*columns, console=console, transient=True, disable=quiet or not console.is_terminal)


def empty_table(
    title: str, headings: Sequence[str], *, numbers: Collection[str] = (), folded: Collection[str] = ()
) -> Table:
    """A table without rows. Columns `numbers` are right-aligned; narrow terminals wrap those in `folded`."""
    empty = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name in headings:
        fold = name in folded
        empty.add_column(
            name,
            justify="right" if name in numbers else "left",
            no_wrap=not fold,
            overflow="fold" if fold else "ellipsis",
        )
    return empty


def table(
    title: str,
    caption: str,
    headings: tuple[str, ...],
    rows: list[list[str]],
    *,
    optional: tuple[str, ...] = (),
    folded: str = "",
    width: int | None = None,
) -> Table:
    """A table whose columns keep their width, but for the `folded` one, by default the last; numbers are
    right-aligned. `optional` columns
    are left out if they are empty, or, in their order, while the table is wider than `width`; the caption
    names the latter."""
    shown = [
        name
        for name in headings
        if name not in optional or any(row[headings.index(name)] not in ("-", "") for row in rows)
    ]
    cells = [
        [Text.from_markup(cell, emoji=False) for cell in column] for column in zip(*rows, strict=True)
    ] or [[] for _ in headings]
    numbers = {name for name, column in zip(headings, cells, strict=True) if _has_numbers(column)}
    folded = folded or headings[-1]
    room, cut = dict(zip(headings, _widths(headings, cells, folded), strict=True)), []
    padding = 1 if width is None or _needed(room, shown, 1) <= width else 0
    for name in (name for name in optional if name in shown):
        if width is not None and _needed(room, shown, padding) > width:
            shown.remove(name)
            cut.append(name)
    caption = "; ".join(part for part in (caption, f"no room for: {', '.join(cut)}" if cut else "") if part)
    filled = empty_table(title, shown, numbers=numbers, folded=[folded])
    filled.caption, filled.caption_justify, filled.padding = caption, "left", (0, padding, 0, 0)
    for name, column in zip(shown, filled.columns, strict=True):
        column.min_width = None if name == folded else room[name]
    for row in rows:
        filled.add_row(*(row[headings.index(name)] for name in shown))
    return filled


def _has_numbers(column: list[Text]) -> bool:
    filled = {cell.plain for cell in column} - {""}
    return bool(filled) and all(map(NUMBER.fullmatch, filled))


def _widths(headings: tuple[str, ...], cells: list[list[Text]], folded: str) -> list[int]:
    """The width of each column: that of its longest cell, or of the longest word in the folded column."""
    widths = []
    for name, column in zip(headings, cells, strict=True):
        lengths = [cell.cell_len for cell in column]
        if name == folded:
            words = [len(word) for cell in column for word in cell.plain.split()]
            lengths = [min(LONG_WORD, max(words, default=0))]
        widths.append(max(len(name), *lengths, 0))
    return widths


def _needed(room: dict[str, int], shown: list[str], padding: int) -> int:
    """Width of a table with an edge, and a gap after each column."""
    return 1 + sum(room[name] + padding + 1 for name in shown)
