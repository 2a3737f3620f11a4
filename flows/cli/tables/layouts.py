"""The tables of a search for layouts.

Invariant: only units are computed here; every number comes from the search.
"""

from __future__ import annotations

from rich.console import Console
from rich.markup import escape

from flows.cli.tables import table
from flows.cli.tables.estimate import size
from flows.execution.layout_search import Found, Search, described
from flows.format import amount


def show_search(console: Console, found: Search) -> None:
    """Prints the layouts found, fastest first, beside the recipe's own, and each as YAML to paste."""
    rows = [_row(str(number), one, found) for number, one in enumerate(found.best, 1)]
    rows.append(_row("own", found.own, found))
    rows += [_row("-", one, found) for one in found.dropped]
    headings = ("", "memory", "of plan", "expected", "predicted", "beside own", "layout")
    agreement = "" if found.agreement is None else f"; their orders agree by {found.agreement:.2f} (Spearman)"
    caption = (
        f"memory: rehearsed, of {size(found.memory_limit)} that the {found.gpu} has; tokens per second and"
        f" GPU, expected by formulas and predicted by a rehearsal{agreement}"
    )
    title = f"{found.part} on {found.gpus:,} GPUs: the best of {found.layouts:,} layouts"
    if found.own_gpus != found.gpus:
        title += f"; the recipe has {found.own_gpus:,} GPUs"
    console.print(
        table(title, caption, headings, rows, optional=("of plan", "expected"), width=console.width)
    )
    if found.float8 is not None:
        faster = found.float8 / found.best[0].expected
        console.print(
            "precision.linear: float8 changes results and fingerprint; layout 1 with it:"
            f" {amount(found.float8)} tokens/s expected, {faster:.2f} of the same without",
            highlight=False,
            soft_wrap=True,
        )
    for number, one in enumerate(found.best, 1):
        console.print(f"\n# {number}: {escape(described(one.launch, one.settings))}", highlight=False)
        console.print(escape(one.yaml.rstrip()), highlight=False, soft_wrap=True)


def _row(name: str, one: Found, found: Search) -> list[str]:
    own, speed = found.own.tokens_per_second_per_gpu, one.tokens_per_second_per_gpu
    layout = described(one.launch, one.settings)
    return [
        name,
        size(one.memory) if one.memory is not None else "",
        f"{one.planned_memory / one.memory - 1:+.1%}" if one.memory else "",
        amount(one.expected),
        amount(speed) if speed is not None else "",
        f"{speed / own:.2f}" if speed is not None and own else "",
        escape(f"{layout}: {one.dropped}" if one.dropped else layout),
    ]
