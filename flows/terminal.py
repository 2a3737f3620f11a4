"""The style of tables in a terminal."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from rich.box import SIMPLE_HEAD
from rich.table import Table


def empty_table(
    title: str, headings: Sequence[str], *, numbers: Collection[str] = (), folded: Collection[str] = ()
) -> Table:
    """A table without rows. The columns `numbers` are right-aligned; the cells of the columns `folded` are
    wrapped where the terminal is too narrow."""
    found = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name in headings:
        fold = name in folded
        found.add_column(
            name,
            justify="right" if name in numbers else "left",
            no_wrap=not fold,
            overflow="fold" if fold else "ellipsis",
        )
    return found
