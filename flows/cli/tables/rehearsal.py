"""Tables of a rehearsal and of a search for layouts.

Invariant: only units are computed here; every number comes from the rehearsal or the search.
"""

from typing import Any

from rich.console import Console
from rich.markup import escape

from apertus_model.rehearsal.records import PartResult
from flows.execution.layout_search import Found, Search, described
from flows.format import amount, size
from flows.rehearsal_tables import tables
from flows.terminal import table


def show_part(console: Console, part: PartResult) -> None:
    """Prints the ranks of a part that do not build, and the tables of the others."""
    for rank, failure in part.failures:
        why = failure.error + (f" ({failure.place})" if failure.place else "")
        which = f"[red]rank {rank} of {part.gpus} of {escape(part.part)} does not build:[/]"
        console.print(f"{which} {escape(why)}", soft_wrap=True)
    width = console.width
    for each in tables(part):
        title, rows = escape(f"{part.part}: {each.title}"), [list(map(escape, row)) for row in each.rows]
        options: dict[str, Any] = {"optional": each.optional, "folded": each.headings[0], "width": width}
        console.print(table(title, each.caption, each.headings, rows, **options))
        console.print()


# A search for layouts


def show_search(console: Console, search: Search) -> None:
    """Prints the layouts found, fastest first, beside the recipe's own, and each as YAML to paste."""
    rows = [_row(str(number), layout, search) for number, layout in enumerate(search.best, 1)]
    rows.append(_row("own", search.own, search))
    rows += [_row("-", layout, search) for layout in search.dropped]
    headings = ("", "memory", "of plan", "expected", "predicted", "beside own", "layout")
    caption = (
        f"memory: rehearsed, of {size(search.memory_limit)} that the {search.gpu} has; tokens per second and"
        " GPU, expected by formulas and predicted by a rehearsal"
    )
    if search.agreement is not None:
        caption += f"; their orders agree by {search.agreement:.2f} (Spearman)"
    title = f"{search.part} on {search.gpus:,} GPUs: the best of {search.layouts:,} layouts"
    if search.own_gpus != search.gpus:
        title += f"; the recipe has {search.own_gpus:,} GPUs"
    console.print(
        table(title, caption, headings, rows, optional=("of plan", "expected"), width=console.width)
    )
    if search.float8 is not None:
        changes = "precision.linear: float8 changes results and fingerprint; layout 1 with it"
        speed = f"{amount(search.float8)} tokens/s expected, {search.float8 / search.best[0].expected:.2f}"
        console.print(f"{changes}: {speed} of the same without", highlight=False, soft_wrap=True)
    for number, layout in enumerate(search.best, 1):
        console.print(f"\n# {number}: {escape(described(layout.launch, layout.settings))}", highlight=False)
        console.print(escape(layout.yaml.rstrip()), highlight=False, soft_wrap=True)


def _row(name: str, result: Found, search: Search) -> list[str]:
    own, speed = search.own.tokens_per_second_per_gpu, result.tokens_per_second_per_gpu
    layout = described(result.launch, result.settings)
    return [
        name,
        size(result.memory) if result.memory is not None else "",
        f"{result.planned_memory / result.memory - 1:+.1%}" if result.memory else "",
        amount(result.expected),
        amount(speed) if speed is not None else "",
        f"{speed / own:.2f}" if speed is not None and own else "",
        escape(f"{layout}: {result.dropped}" if result.dropped else layout),
    ]
