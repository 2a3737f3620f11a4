"""Progress in a terminal, and where there is none."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from threading import Thread
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import ConsoleRenderable, RenderHook

from flows.cli.live import Live, OneWriter, Plain
from flows.terminal import make_console
from specs.job import ProgressRow


def test_lines_of_progress_come_every_few_seconds_and_the_last_one_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [100.0]
    monkeypatch.setattr("flows.cli.live.time.monotonic", lambda: now[0])
    lines = Plain(make_console(file=io.StringIO(), color_system=None))
    for seconds, done in ((0, 1), (1, 2), (60, 3), (61, 4), (62, 4)):
        now[0] = 100.0 + seconds
        lines.progress("sft", ProgressRow(done=done, total=4, unit="steps"))
    output = lines.console.file.getvalue()  # type: ignore[attr-defined]
    assert output.splitlines() == ["sft: steps 1/4", "sft: steps 3/4", "sft: steps 4/4"]


def screen(written: str) -> list[str]:
    """The lines that a terminal shows after these characters: text, line ends, and the controls that move the
    cursor up (`A`) and erase a line (`2K`)."""
    lines, row, column = [""], 0, 0
    for control, character in re.findall(r"\x1b\[([\d;?]*[A-Za-z])|([^\x1b])", written):
        if control == "2K":
            lines[row] = ""
        elif control.endswith("A"):
            row = max(0, row - int(control[:-1]))
        elif character == "\n":
            row += 1
            lines += [""] * (row + 1 - len(lines))
        elif character == "\r":
            column = 0
        elif character:
            lines[row] = lines[row][:column].ljust(column) + character + lines[row][column + 1 :]
        column = 0 if character == "\n" else column + bool(character and character != "\r")
    return [line.rstrip() for line in lines]


class Between(RenderHook):
    """Lets another thread call between the layout of a line and its writing."""

    def __init__(self) -> None:
        self.call: Callable[[], None] | None = None

    def process_renderables(self, renderables: list[ConsoleRenderable]) -> list[ConsoleRenderable]:
        if self.call is not None:
            thread, self.call = Thread(target=self.call, daemon=True), None
            thread.start()
            thread.join(timeout=0.3)  # until it has written; it cannot where only one may write
        return renderables


@pytest.mark.parametrize("other", ["begin", "note", "print", "refresh"])
def test_no_line_is_lost_or_stale_when_another_thread_writes_meanwhile(other: str) -> None:
    output, between = io.StringIO(), Between()
    a, b, c = (SimpleNamespace(node=SimpleNamespace(name=name)) for name in ("first", "second", "third"))
    live: Any = Live(OneWriter(file=output, force_terminal=True, width=100, color_system=None), 3)
    calls: dict[str, Callable[[], None]] = {
        "begin": lambda: live.begin(c),
        "note": lambda: live.note("third", "held"),
        "print": lambda: print("a warning"),
        "refresh": lambda: refreshed(output),
    }

    def refreshed(output: io.StringIO) -> None:
        """Returns when the display has been drawn again."""
        length = len(output.getvalue())
        while len(output.getvalue()) == length:
            pass

    with live:
        live.console.push_render_hook(between)
        live.begin(a)
        live.begin(b)
        live.end(a, "finished", 1.0, {})
        between.call = calls[other]
        live.end(b, "finished", 2.0, {})
    lines = screen(output.getvalue())
    shown = [line for line in lines if line.startswith("done")]
    assert shown == ["done first in 1.0 s", "done second in 2.0 s"], lines
    assert sum("pipeline" in line for line in lines) == 1, lines
    assert sum("second" in line or "first" in line for line in lines) == 2, lines
