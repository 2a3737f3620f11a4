"""What people see: tables of plan and status, a live bar for what runs, plain lines where there is no terminal.

Invariants: nothing here decides anything; every number comes from the plan, the store or a stage's progress. What is no
markup of ours is printed as it is written: it goes through `escape`, and no console or text knows emoji codes (`:smile:`).
"""

from __future__ import annotations

import shlex
import sys
import time
from pathlib import Path
from typing import Any, Literal

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, SpinnerColumn, Task, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from flows.plan import Plan, Step
from infra.store import Artifact, StoreError
from specs.redaction import redacted

COLOURS = {"reuse": "green", "resume": "yellow", "run": "cyan"}
DONE = {"finished": "[green]done[/]", "reused": "[green]kept[/]"}
PLAIN_INTERVAL = 5.0
WIDE = 110  # columns of a terminal from which on there is room for ids
ROUNDED_UP = 0.9995  # of a magnitude: from here on three digits are the next one
NUMBERS = (  # columns set to the right
    *("steps", "tokens", "draws", "drawn", "FLOPs", "GPUs", "time", "GPU-hours", "energy", "cost", "per GPU", "total", "difference"),
    *("weights", "grads", "states", "kept", "working", "output", "gathered", "update"),
    *("checkpoint", "each", "stop", "write", "every", "Young/Daly", "written", "in all", "stored", "requests"),
    *("from step", "to step", "from token", "to token", "masked 1/k", "by hash"),
)


def make_console(**options: Any) -> Console:
    """A console for names, paths and messages of others."""
    return Console(emoji=False, **options)


def amount(value: float) -> str:
    """1,234 as `1.23k`: three digits and a magnitude; `-` for zero."""
    if not value:
        return "-"
    for limit, suffix in ((1e24, "Y"), (1e21, "Z"), (1e18, "E"), (1e15, "P"), (1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if value >= limit * ROUNDED_UP:
            return f"{value / limit:.3g}{suffix}"
    return f"{value:.3g}"


def quantity(value: float) -> str:
    """The same in a sentence, where zero is a number too."""
    return amount(value) if value else "0"


def in_full(value: float, digits: int = 4) -> str:
    """As a person writes it: a count in full (`25,120`), and of a fraction so many digits, but all of those before the point."""
    if isinstance(value, float) and abs(value) < 10**digits - 0.5:
        return f"{value:,.{digits}g}"
    return f"{value:,.0f}"


def flop(value: float) -> str:
    """Floating-point operations as papers write them: `6.74e24`; `-` for zero."""
    return f"{value:.3g}".replace("e+", "e") if value else "-"


def status_table(plan: Plan, width: int) -> Table:
    """Finished and unfinished parts with what the manifests say; in a narrow terminal without ids, which `--json` has."""
    rows = []
    for row in status_rows(plan):
        seconds = row["seconds"] or {}
        times = "+".join(f"{seconds[name]:.1f}" for name in ("startup", "compute", "storage") if name in seconds)
        colour = {"finished": "green", "interrupted": "yellow", "gate failed": "red"}.get(row["state"], "cyan")
        numbers = (amount(row["steps"]), amount(row["tokens"]))
        result = escape(row["holder"] or headline(row["metrics"] or {}))
        name = [row["name"], f"[{colour}]{row['state']}[/]", *([row["fingerprint"][:8]] if width >= WIDE else [])]
        rows.append([*name, *numbers, times, result])
    headings = ("part", "state", *(["id"] if width >= WIDE else []), "steps", "tokens", "seconds*", "result")
    caption = f"* start-up + compute + storage; store: {escape(plan.store.url)}"
    found = table(f"status of {plan.pipeline.name}", caption, headings, rows)
    names = found.columns[0]
    names.no_wrap, names.min_width, names.overflow = False, None, "fold"  # they share what is left with the results
    return found


def table(
    title: str,
    caption: str,
    headings: tuple[str, ...],
    rows: list[list[str]],
    *,
    optional: tuple[str, ...] = (),
    width: int | None = None,
) -> Table:
    """A table whose columns keep their width; the last one gets what is left of the terminal. `optional`: columns that are left out where
    no row has a value, and, those named first before the others, where the table is wider than `width`; the caption says so."""
    shown = [name for name in headings if name not in optional or any(row[headings.index(name)] not in ("-", "") for row in rows)]
    room, cut = dict(zip(headings, _widths(headings, rows), strict=True)), []
    padding = 1 if width is None or _needed(room, shown, 1) <= width else 0
    for name in (name for name in optional if name in shown):
        if width is not None and _needed(room, shown, padding) > width:
            shown.remove(name)
            cut.append(name)
    caption = "; ".join(part for part in (caption, f"no room for: {', '.join(cut)}" if cut else "") if part)
    found = Table(title=title, title_justify="left", caption=caption, caption_justify="left", box=SIMPLE_HEAD, padding=(0, padding, 0, 0))
    for name in shown[:-1]:
        justify: Literal["left", "right"] = "right" if name in NUMBERS else "left"
        found.add_column(name, justify=justify, no_wrap=True, min_width=room[name])
    found.add_column(shown[-1], justify="right" if shown[-1] in NUMBERS else "left", overflow="fold")
    for row in rows:
        found.add_row(*(row[headings.index(name)] for name in shown))
    return found


LONG_WORD = 24  # characters; a longer one of the last column, such as a path, may be broken


def _widths(headings: tuple[str, ...], rows: list[list[str]]) -> list[int]:
    """What each column needs: the longest of its cells, and the longest word of the last one."""
    cells = [[Text.from_markup(cell, emoji=False) for cell in column] for column in zip(*rows, strict=True)] or [[] for _ in headings]
    widths = [max(len(name), *(cell.cell_len for cell in column), 0) for name, column in zip(headings, cells, strict=True)]
    words = [len(word) for cell in cells[-1] for word in cell.plain.split()]
    return [*widths[:-1], max(len(headings[-1]), min(LONG_WORD, max(words, default=0)))]


def _needed(room: dict[str, int], shown: list[str], padding: int) -> int:
    """Width of a table with an edge, and a gap behind each column."""
    return 1 + sum(room[name] + padding + 1 for name in shown)


def status_rows(plan: Plan) -> list[dict[str, Any]]:
    """The same as plain values."""
    rows = []
    for name, step in plan.steps.items():
        manifest = Artifact(plan.store, step.node.path, step.node.end_step).manifest if step.action == "reuse" else None
        state = "finished" if manifest else "held" if step.holder else "interrupted" if step.stored else "not run"
        rows.append(
            {
                "name": name,
                "kind": step.node.kind,
                "state": "gate failed" if step.gate_failures else state,
                "reason": step.reason,
                "holder": step.holder,
                "fingerprint": step.node.fingerprint,
                "path": step.node.path if step.stored else None,
                "steps": step.node.steps,
                "tokens": step.node.tokens or (int(manifest["metrics"].get("tokens", 0)) if manifest and step.node.kind == "corpus" else 0),
                "seconds": manifest.get("seconds") if manifest else None,
                "metrics": manifest["metrics"] if manifest else None,
                "created": manifest.get("created") if manifest else None,
            }
        )
    return rows


HEADLINES = (
    *("loss", "validation_loss", "perplexity", "documents", "conversations", "vocab_size", "logit_difference"),
    *("reward/mean", "reward/difference", "mean_offline", "mean_sampled", "pairs", "prompts", "completions", "sequences"),
)
SHOWN = 3


def headline(metrics: dict[str, Any]) -> str:
    """The few numbers that say how a part turned out."""
    found = [f"{name.replace('_', ' ')} {in_full(metrics[name])}" for name in HEADLINES if isinstance(metrics.get(name), (int, float))]
    return ", ".join(found[:SHOWN])


class _TimeLeft(TimeRemainingColumn):
    """Not for the pipeline as a whole: its parts are too different for an extrapolation."""

    def render(self, task: Task) -> Text:
        return Text() if task.fields.get("parts") else super().render(task)


class Live:
    """Bars in a terminal: what runs, how far, tokens per second, loss, time left."""

    def __init__(self, console: Console, total: int) -> None:
        self.console = console
        self.display = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(bar_width=28),
            TextColumn("{task.fields[numbers]}"),
            TimeElapsedColumn(),
            _TimeLeft(compact=True),
            console=console,
            transient=False,
        )
        self.total = total
        self.whole = self.display.add_task("[bold]pipeline[/]", total=total, numbers=f"0 of {total} parts", parts=True)
        self.bars: dict[str, TaskID] = {}
        self.finished: set[str] = set()

    def __enter__(self) -> Live:
        self.display.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.display.stop()

    def begin(self, step: Step) -> None:
        name = step.node.name
        if name in self.bars:
            self.display.remove_task(self.bars[name])
        self.bars[name] = self.display.add_task(f"[cyan]{escape(name)}[/]", total=None, numbers="starting")

    def line(self, name: str, text: str) -> None:
        """A stage's own lines go to its log."""

    def note(self, name: str, text: str) -> None:
        self.display.console.print(f"[yellow]note[/] {escape(name)}: {escape(text)}", soft_wrap=True)

    def progress(self, name: str, row: dict[str, Any]) -> None:
        if name in self.bars:
            self.display.update(self.bars[name], total=row["total"], completed=row["done"], numbers=describe(row))

    def end(self, step: Step, outcome: str, seconds: float, metrics: dict[str, Any] | None) -> None:
        name = step.node.name
        if name in self.bars:
            self.display.remove_task(self.bars.pop(name))
        self.display.console.print(finished_line(step, outcome, seconds, metrics))
        if outcome in DONE and name not in self.finished:
            self.finished.add(name)
            numbers = f"{len(self.finished)} of {self.total} parts"
            self.display.update(self.whole, completed=len(self.finished), numbers=numbers)


class Plain:
    """The same as lines, for logs and pipes."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.last: dict[str, tuple[float, str]] = {}

    def __enter__(self) -> Plain:
        return self

    def __exit__(self, *_: object) -> None: ...

    def begin(self, step: Step) -> None:
        self.console.print(escape(f"{step.node.name}: {step.action}, {step.reason}" if step.reason else f"{step.node.name}: {step.action}"))

    def line(self, name: str, text: str) -> None:
        """A stage's own lines go to its log."""

    def note(self, name: str, text: str) -> None:
        self.console.print(f"[yellow]note[/] {escape(name)}: {escape(text)}", soft_wrap=True)

    def progress(self, name: str, row: dict[str, Any]) -> None:
        now, text = time.monotonic(), describe(row)
        before, told = self.last.get(name, (0.0, ""))
        if text != told and (row["done"] >= row["total"] or now - before >= PLAIN_INTERVAL):
            self.last[name] = now, text
            self.console.print(escape(f"{name}: {text}"))

    def end(self, step: Step, outcome: str, seconds: float, metrics: dict[str, Any] | None) -> None:
        self.console.print(finished_line(step, outcome, seconds, metrics))


def describe(row: dict[str, Any]) -> str:
    """`step 120/400  9.1k tokens/s  loss 3.21`."""
    metrics = dict(row["metrics"])
    text = f"{row['unit']} {row['done']:g}/{row['total']:g}"
    if (speed := metrics.pop("tokens_per_second", None)) is not None:
        text += f"  {amount(speed)} tokens/s"
    for name in ("loss", "validation_loss"):
        if (value := metrics.pop(name, None)) is not None:
            text += f"  {name.replace('_', ' ')} {value:.3f}"
    if (queued := metrics.pop("queued", None)) is not None:
        text += f"  {metrics.pop('running'):g} running, {queued:g} queued"
    return text


def finished_line(step: Step, outcome: str, seconds: float, metrics: dict[str, Any] | None) -> str:
    text = headline(metrics or {}) if outcome in DONE else outcome
    took = "" if outcome == "reused" else f" [dim]in {seconds:.1f} s[/]"
    return f"{DONE.get(outcome, '[red]stop[/]')} {escape(step.node.name)}{took}  {escape(text)}".rstrip()


def watcher(console: Console, total: int) -> Live | Plain:
    return Live(console, total) if console.is_terminal else Plain(console)


def outro(console: Console, plan: Plan, spec: str, store: str | None, overrides: list[str]) -> None:
    """Where the model is, and three commands to go on with, about the same store and the recipe with the same overrides."""
    exports = [
        step.node
        for step in plan.steps.values()
        if step.node.kind == "export" and step.node.name == step.node.stage and step.action == "reuse"
    ]
    for node in exports:
        try:
            artifact = Artifact(plan.store, node.path)
            folder = plan.store.location(artifact.stored_name("config.json").rsplit("/", 1)[0])
        except (StoreError, KeyError):
            continue
        console.print(f"[bold]{escape(node.name)}[/]: the model is in\n  {escape(_short(folder))}", soft_wrap=True)
    program = shlex.quote(_short(sys.argv[0])) if Path(sys.argv[0]).exists() else "apertus"
    last = exports[-1].stage if exports else next(reversed(plan.pipeline.stages))
    training = [
        leg
        for leg, trajectory in plan.graph.trajectories.items()
        if leg == trajectory.stage and trajectory.optimizer.lr and not trajectory.merged
    ]
    chosen = [*(["--store", store] if store else []), *(x for override in overrides for x in ("--set", override))]
    recipe, options = shlex.quote(spec), "".join(f" {shlex.quote(redacted(option))}" for option in chosen)
    console.print("Next:")
    for command in (f"status {recipe}", f"lineage {recipe} {last}"):
        console.print(escape(f"  {program} {command}{options}"), soft_wrap=True)
    if training:
        lr = plan.graph.trajectories[training[-1]].optimizer.lr or 0.0
        halved = f"--set stages.{training[-1]}.optimizer.lr={lr / 2:g}"
        console.print(escape(f"  {program} plan {recipe}{options} {halved}"), soft_wrap=True)


def _short(path: str) -> str:
    """A local path relative to the working folder where it lies below it; a URL as it is."""
    if "://" in path:
        return path
    try:
        return str(Path(path).resolve().relative_to(Path.cwd()))
    except ValueError:
        return path
