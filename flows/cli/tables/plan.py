"""The output of `apertus plan`: totals, then actions, estimates, use of sources, notes and advice.

Invariants: nothing here decides anything; every number comes from the plan. Parts or variants of a stage with
equal rows share one row with their sum; `details` shows each part. `--json` has everything, without folding.
"""

import re
from collections import Counter
from collections.abc import Collection, Hashable, Iterable, Iterator
from typing import NamedTuple

from rich.console import Console
from rich.markup import escape
from rich.padding import Padding
from rich.table import Table

from flows.cli.tables import estimate as tables
from flows.format import COLOURS, amount, duration, energy, flop, quantity, size
from flows.planning import declared_inputs
from flows.planning.plan import Plan, Step
from flows.planning.source_usage import SourceUsage
from flows.terminal import table
from specs.advice import CODES
from specs.errors import some_of
from specs.pipeline import Pipeline

FEWEST = {"parts": 3, "variants": 4}  # least number of rows that are folded into one
NAMED = 3  # unavailable inputs in a cell


class Fold(NamedTuple):
    """Parts or stages that share one row, and its label."""

    label: str
    names: list[str]


def folded(
    pipeline: Pipeline, rows: Iterable[tuple[str, str, Hashable]], details: bool = False
) -> list[Fold]:
    """Folds `FEWEST` or more rows (name, its stage, key) with equal keys of one stage, or of variants of one
    stage, in the place of the first. The label says how many of how many rows it stands for."""
    rows = list(rows)
    groups: dict[Hashable, list[tuple[str, str]]] = {}
    order: dict[str, int] = {}
    families = Counter(pipeline.family(stage) for _, stage, _ in rows)
    for name, stage, common in rows:
        order[name] = len(order)
        groups.setdefault(name if details else (pipeline.family(stage), common), []).append((name, stage))
    folds: list[tuple[int, Fold]] = []
    for members in groups.values():
        names = [name for name, _ in members]
        kind = "variants" if all(name == stage for name, stage in members) else "parts"
        if len(names) < FEWEST[kind]:
            folds += [(order[name], Fold(name, [name])) for name in names]
        else:
            family = pipeline.family(members[0][1])
            of = f" of {families[family]}" if len(names) < families[family] else ""
            folds.append((order[names[0]], Fold(f"{family}: {len(names)}{of} {kind}", names)))
    return [fold for _, fold in sorted(folds, key=lambda pair: pair[0])]


def plan_table(
    plan: Plan, details: bool = False, width: int | None = None, chosen: Collection[str] | None = None
) -> Table:
    """A row for each part, or for equal parts of a stage; `chosen`: only parts of these stages."""
    rows, alike = [], list[tuple[str, str, Hashable]]()
    for name, step in plan.steps.items():
        node, reason = step.node, "" if step.unavailable else step.reason
        if chosen is None or node.stage in chosen:
            alike.append((name, node.stage, (step.state, reason, node.steps, node.tokens, node.flops)))
    for label, names in folded(plan.pipeline, alike, details):
        steps = [plan.steps[name] for name in names]
        nodes = [step.node for step in steps]
        action = f"[{COLOURS[steps[0].state]}]{steps[0].state}[/]"
        steps_and_tokens = [
            amount(sum(getattr(node, name) for node in nodes)) for name in ("steps", "tokens")
        ]
        numbers = (*steps_and_tokens, flop(sum(step.flops for step in steps)))
        rows.append([escape(label), action, *numbers, escape(_reason(plan, steps))])
    headings = ("part", "action", "steps", "tokens", "FLOPs", "why")
    caption = "declared: depends on an unavailable input" if plan.graph.unavailable else ""
    return table(
        "what would be done", caption, headings, rows, optional=("FLOPs", "steps", "tokens"), width=width
    )


def _reason(plan: Plan, steps: list[Step]) -> str:
    """The common reason of equal steps, or the unavailable inputs that they read directly."""
    if not steps[0].unavailable:
        return steps[0].reason
    names = dict.fromkeys(name for step in steps for name in declared_inputs.own(plan.graph, step.node))
    return f"unavailable: {some_of(names, NAMED)}" if names else ""


def source_usage_table(plan: Plan, details: bool = False, width: int | None = None) -> Table:
    """The use of the sources by training: with `details` by each stage, else for each source by the stage
    with the most passes since new weights, sources nearest to their limits first."""
    usages = plan.source_usage
    if not details:
        most: dict[str, SourceUsage] = {}
        for usage in sorted(plan.source_usage, key=lambda usage: -usage.passes / usage.allowed):
            most.setdefault(usage.source, usage)
        usages = list(most.values())
    rows = []
    for usage in usages:
        known = f"{'' if usage.exact else 'declared ' if usage.declared else '<= '}{amount(usage.available)}"
        passes = f"{usage.passes:.2f} of {usage.allowed:g}"
        passes += f", {amount(usage.shortfall)} tokens short" if usage.shortfall else ""
        drawn = [known, amount(usage.consumed), passes, amount(usage.tokens)]
        rows.append([escape(usage.source), *drawn, escape(usage.stage)])
    headings = ("source", "holds", "drawn", "passes", "draws", "stage" if details else "most after")
    caption = "tokens; draws: by the stage; drawn: since new weights"
    return table("what training draws", caption, headings, rows, optional=("draws", "drawn"), width=width)


def show_plan(console: Console, plan: Plan, details: bool = False) -> None:
    """Prints the whole plan, the most important facts first."""
    pipeline, totals, width = plan.pipeline, plan.totals(), console.width
    console.print(f"[bold]plan of {escape(pipeline.name)}[/]  {escape(pipeline.description)}", soft_wrap=True)
    facts = [
        f"{amount(totals['parameters'])} parameters",
        f"{amount(totals['tokens'])} tokens",
        f"{flop(totals['flops'])} FLOPs",
    ]
    estimates, whole = plan.estimates, plan.estimates.totals()
    if whole["gpu_hours"]:
        facts += [
            f"{amount(whole['gpu_hours'])} GPU-hours",
            duration(whole["seconds"]),
            energy(whole["energy_kwh"]),
        ]
        facts += [f"cost {amount(whole['cost'])}"] if whole["cost"] else []
    facts += [f"{size(whole['memory_bytes'])} per GPU"] if whole["memory_bytes"] else []
    facts += [f"{len(whole['not_counted'])} parts not counted in full"] if whole["not_counted"] else []
    show_item(console, "in all", ", ".join(facts))
    todo = totals["to_do"]
    show_item(console, "to do", f"{todo['parts']} of {plan.parts} parts, {quantity(todo['tokens'])} tokens")
    if estimates.corpora:
        show_item(console, "corpora", tables.corpora_line(estimates))
    show_item(console, "store", plan.store.url)
    console.print()
    console.print(plan_table(plan, details, width))
    if estimates.stages or estimates.inference:
        stages = [(name, name, stage.alike) for name, stage in estimates.stages.items()]
        alike, asked = dict(folded(pipeline, stages)), dict[str, list[str]]()
        for name in estimates.inference:
            asked.setdefault(pipeline.family(name), []).append(name)
        console.print(tables.estimate_table(estimates, alike, asked, width))
        if estimates.inference:
            parts = [(part.node.name, part.node.stage, part.alike) for part in estimates.asking]
            console.print(tables.inference_table(estimates, dict(folded(pipeline, parts, details)), width))
        if details and estimates.stages:
            console.print(tables.memory_table(estimates, alike, width))
            console.print(tables.checkpoint_table(estimates, alike, width))
            console.print(tables.segment_table(estimates, width))
    if details and estimates.corpora:
        console.print(tables.corpus_table(estimates, width))
    if plan.source_usage:
        console.print(source_usage_table(plan, details, width))
    for note in _notes(plan, details):
        show_item(console, "note", note)
    for suite, names in plan.graph.tasks.items() if details else ():
        for name, tasks in names.items():
            if tasks != [name]:
                show_item(console, "tasks", f"{suite}: {name} is {', '.join(tasks)}")
    show_advice(console, plan, details)


def _notes(plan: Plan, details: bool) -> Iterator[str]:
    """The notes. Without `details`, the first of those that differ only in which variant they name."""
    alike: dict[str, list[str]] = {}
    for note in plan.graph.notes:
        common = note if details else re.sub(r"[\w.-]+", lambda word: plan.pipeline.family(word[0]), note)
        alike.setdefault(common, []).append(note)
    for first, *others in alike.values():
        yield first + f" (and {len(others)} more like it; --details has them)" * bool(others)


def show_item(console: Console, label: str, text: str, style: str = "", indent: int = 0) -> None:
    """Prints a labelled line, broken between words and indented in a terminal only."""
    if not console.is_terminal:
        console.print(f"{' ' * indent}{escape(label)}: {escape(text)}", style=style, soft_wrap=True)
        return
    grid = Table.grid(padding=(0, 1))
    grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold")
    grid.add_row(f"[bold]{escape(label)}[/]:", escape(text))
    console.print(Padding(grid, (0, 0, 0, indent)), style=style)


def show_advice(console: Console, plan: Plan, details: bool = False) -> None:
    """Prints the advice by code: the reason once, then a message for each stage or family of variants."""
    codes = dict.fromkeys(advice.code for advice in plan.advice.given)
    for code in codes:
        about = CODES[code]
        console.print(f"[yellow]advice[/] [bold]{code}[/]", soft_wrap=True)
        show_item(console, "why", f"{about.reason} ({about.source})", style="dim", indent=2)
        given = [(str(at), advice) for at, advice in enumerate(plan.advice.given) if advice.code == code]
        by_place = dict(given)
        for fold in folded(plan.pipeline, [(at, advice.stage, None) for at, advice in given], details):
            advice, more = by_place[fold.names[0]], len(fold.names) - 1
            likewise = f" (and {more} more of {plan.pipeline.family(advice.stage)}; --details has them)"
            show_item(console, advice.stage, advice.message + likewise * bool(more), indent=2)
    silenced: dict[str, list[str]] = {}
    for advice in plan.advice.silenced:
        silenced.setdefault(advice.code, []).append(advice.stage)
    for code, stages in silenced.items():
        folds = folded(plan.pipeline, [(name, name, None) for name in dict.fromkeys(stages)], details)
        names = ", ".join(fold.label for fold in folds)
        show_item(console, "silenced", f"{code} ({names})", style="dim")
