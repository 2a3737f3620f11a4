"""Tables of the terminal."""

from __future__ import annotations

import io

import pytest
from rich.markup import escape

from flows.terminal import make_console, table
from tests.flows.cli.printing import ODD


@pytest.mark.parametrize("text", ODD)
def test_a_cell_is_as_wide_as_it_is_written(text: str) -> None:
    found = table("title", "", ("name", "result"), [[escape(text), escape(text)]])
    assert found.columns[0].min_width == max(len(text), len("name"))
    console = make_console(width=80, file=io.StringIO(), color_system=None)
    console.print(found)
    assert console.file.getvalue().count(text) == 2  # type: ignore[attr-defined]


def test_columns_of_numbers_are_right_aligned() -> None:
    rows = [
        ["a", "1,234", "57.2 GB", "+4.8%", "<= 1.2T", "-", "[red]80 GB[/]", "own", "1 of 4", "3d74c4ab", ""],
        ["b", "-", "12 min", "-3%", "1.23k", "6.74e24", "", "1", "2", "12345678", ""],
    ]
    headings = tuple("abcdefghijk")
    justified = {column.header: column.justify for column in table("", "", headings, rows).columns}
    assert [name for name in headings if justified[name] == "right"] == [*"bcdefg"]
