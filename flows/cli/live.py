"""The progress of a run: bars in a terminal, else plain lines."""

from __future__ import annotations

import time
from threading import Event, RLock, Thread
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    Progress,
    SpinnerColumn,
    Task,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.text import Text

from flows.execution.runner import Observer
from flows.format import describe, headline
from flows.planning.plan import Step
from specs.job import ProgressRow

DONE = {"finished": "[green]done[/]", "reused": "[green]kept[/]"}
PLAIN_INTERVAL = 5.0  # seconds
REFRESH_INTERVAL = 0.1  # seconds


class _TimeLeft(TimeRemainingColumn):
    """The time left; hidden for the pipeline as a whole, whose parts are too different to extrapolate."""

    def render(self, task: Task) -> Text:
        return Text() if task.fields.get("parts") else super().render(task)


class OneWriter(Console):
    """A console for several threads: what one prints is laid out and written before another begins. Rich
    locks the writing alone, and moves the cursor to the beginning of the bars as they were at the layout."""

    _turn = RLock()

    def __enter__(self) -> Console:
        self._turn.acquire()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        try:
            super().__exit__(*error)
        finally:
            self._turn.release()


class _Watcher(Observer):
    """Prints notes; a stage's own lines go to its log."""

    console: Console

    def note(self, name: str, text: str) -> None:
        self.console.print(f"[yellow]note[/] {escape(name)}: {escape(text)}", soft_wrap=True)


class Live(_Watcher):
    """Bars in a terminal: running parts, progress, tokens per second, loss, time left. Whatever draws or
    prints has its turn at the console before it takes the locks of the bars."""

    def __init__(self, console: OneWriter, total: int) -> None:
        self.console: OneWriter = console
        self.display = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(bar_width=28),
            TextColumn("{task.fields[numbers]}"),
            TimeElapsedColumn(),
            _TimeLeft(compact=True),
            console=self.console,
            auto_refresh=False,  # by a thread that has no turn
        )
        self.total = total
        numbers = f"0 of {total} parts"
        self.whole = self.display.add_task("[bold]pipeline[/]", total=total, numbers=numbers, parts=True)
        self.bars: dict[str, TaskID] = {}
        self.finished: set[str] = set()
        self._over = Event()
        self._refresher = Thread(target=self._refresh, daemon=True)

    def __enter__(self) -> Live:
        with self.console:
            self.display.start()
        self._refresher.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._refresher.join()
        with self.console:
            self.display.stop()

    def _refresh(self) -> None:
        while not self._over.wait(REFRESH_INTERVAL):
            with self.console:
                self.display.refresh()

    def begin(self, step: Step) -> None:
        name = step.node.name
        with self.console:
            if name in self.bars:
                self.display.remove_task(self.bars[name])
            label = f"[cyan]{escape(name)}[/]"
            self.bars[name] = self.display.add_task(label, total=None, numbers="starting")

    def progress(self, name: str, row: ProgressRow) -> None:
        if name in self.bars:
            self.display.update(self.bars[name], total=row.total, completed=row.done, numbers=describe(row))

    def end(self, step: Step, outcome: str, seconds: float, metrics: dict[str, Any] | None) -> None:
        name = step.node.name
        with self.console:
            if name in self.bars:
                self.display.remove_task(self.bars.pop(name))
            self.console.print(finished_line(step, outcome, seconds, metrics))
            if outcome in DONE and name not in self.finished:
                self.finished.add(name)
                numbers = f"{len(self.finished)} of {self.total} parts"
                self.display.update(self.whole, completed=len(self.finished), numbers=numbers)


class Plain(_Watcher):
    """Progress as lines, for logs and pipes."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.last: dict[str, tuple[float, str]] = {}

    def __enter__(self) -> Plain:
        return self

    def __exit__(self, *_: object) -> None: ...

    def begin(self, step: Step) -> None:
        why = f", {step.reason}" if step.reason else ""
        self.console.print(escape(f"{step.node.name}: {step.action}{why}"))

    def progress(self, name: str, row: ProgressRow) -> None:
        now, text = time.monotonic(), describe(row)
        before, shown = self.last.get(name, (0.0, ""))
        if text != shown and (row.done >= row.total or now - before >= PLAIN_INTERVAL):
            self.last[name] = now, text
            self.console.print(escape(f"{name}: {text}"))

    def end(self, step: Step, outcome: str, seconds: float, metrics: dict[str, Any] | None) -> None:
        self.console.print(finished_line(step, outcome, seconds, metrics))


def finished_line(step: Step, outcome: str, seconds: float, metrics: dict[str, Any] | None) -> str:
    text = headline(metrics or {}) if outcome in DONE else outcome
    took = "" if outcome == "reused" else f" [dim]in {seconds:.1f} s[/]"
    return f"{DONE.get(outcome, '[red]stop[/]')} {escape(step.node.name)}{took}  {escape(text)}".rstrip()


def watcher(console: Console, total: int) -> Live | Plain:
    return Live(OneWriter(emoji=False), total) if console.is_terminal else Plain(console)
