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
