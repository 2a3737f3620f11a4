"""Compares the memory in plans of the published recipes with the memory that a rehearsal counts, and adds the
speed that formulas predict.

    for size in 8b 70b; do apertus rehearse specs/recipes/apertus-$size.yaml --json > $size.json; done
    python -m tools.rehearsals 8b.json 70b.json   # writes its table into docs/estimates.md, between the marks

Invariant: counted numbers come from the files, planned ones from the current formulas.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from pathlib import Path

from apertus_model.rehearsal.rates import Rates
from apertus_model.rehearsal.records import PartResult
from flows.execution.rehearsal import Rehearsal
from flows.planning.estimate.memory import memory_of_rank
from flows.planning.estimate.step_time import of_step
from flows.planning.estimate.training import PartEstimate
from flows.planning.plan import Plan
from specs.cluster import Cluster
from tools.published import placed, plan_of

PAGE = Path(__file__).parents[1] / "docs" / "estimates.md"
MARK = "rehearsed"
HEADINGS = ("part", "GPUs", "first", "second", "last", "tokens/s")


def speed(estimate: PartEstimate, cluster: Cluster) -> float:
    """Tokens per second and GPU, by formulas."""
    rates = Rates(cluster.gpu, cluster.gpus_per_node)
    seconds = of_step(estimate.segment, estimate.gpus, rates).total
    return estimate.segment.tokens_per_step / seconds / estimate.gpus


def row(part: PartResult, plan: Plan) -> tuple[str, ...]:
    """The cells of a part: GPUs, counted memory by rank with the plan's difference, and the speed."""
    estimate = next(each for each in plan.estimates.parts if each.node.name == part.part)
    cells = []
    for rank in part.ranks:
        assert rank.report.rehearsed is not None, f"{part.part} does not build"
        counted = rank.report.rehearsed.memory.total
        planned = memory_of_rank(estimate.segment, estimate.gpus, rank.pipeline_rank).total
        cells.append(f"{counted / 1e9:.2f} {planned / counted - 1:+.1%}")
    assert plan.pipeline.cluster is not None
    cells += [""] * (3 - len(cells))
    return f"{part.gpus:,}", *cells, f"{speed(estimate, plan.pipeline.cluster):,.0f}"


def table(rehearsals: list[Rehearsal]) -> str:
    """The table of all parts; parts with equal numbers share a line."""
    rows = []
    for rehearsal in rehearsals:
        plan = plan_of(rehearsal.pipeline)
        alike = defaultdict[tuple[str, ...], list[str]](list)
        for part in rehearsal.parts:
            alike[part.stage, *row(part, plan)].append(part.part.partition("/")[2])
        size = rehearsal.pipeline.removeprefix("apertus-")
        for (stage, *cells), numbers in alike.items():
            several = f"/{numbers[0]}-{numbers[-1]}" if len(numbers) > 1 else f"/{numbers[0]}"
            only = len({part.part for part in rehearsal.parts if part.stage == stage}) == 1
            rows.append((f"{size}/{stage}{'' if only else several}", *cells))
    widths = [max(map(len, column)) for column in zip(HEADINGS, *rows, strict=True)]
    lines = [
        "    " + "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in (HEADINGS, *rows)
    ]
    return "\n" + "\n".join(lines) + "\n\n"


def main(files: list[str]) -> None:
    """Writes the table into the page."""
    rehearsals = [Rehearsal.model_validate_json(Path(file).read_text()) for file in files]
    PAGE.write_text(placed(PAGE.read_text(), MARK, table(rehearsals)))


if __name__ == "__main__":
    main(sys.argv[1:])
