"""`apertus rehearse`: a training step of single ranks at the real number of processes, without GPUs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from flows.cli.app import (
    JsonOption,
    SetOption,
    SpecArgument,
    StoreOption,
    app,
    console,
    errors,
    make_plan,
    print_json,
)
from flows.cli.output import file_option, write
from specs.errors import SpecError, StageError

if TYPE_CHECKING:
    from apertus_model.rehearsal.records import PartResult
    from flows.execution import rehearsal
    from flows.planning.estimate.training import PartEstimate
    from flows.planning.layouts import Layout
    from flows.planning.plan import Plan

DEFAULT_GPU, DEFAULT_PER_NODE = "H100", 8  # for a recipe without a cluster


@app.command()
def rehearse(
    spec: SpecArgument,
    stage: Annotated[str | None, typer.Argument(metavar="[STAGE]", help="every one by default")] = None,
    part: Annotated[
        int | None,
        typer.Option(
            metavar="N", help="part of the stage, counted from 0; all by default, the longest with --search"
        ),
    ] = None,
    rank: Annotated[
        int | None,
        typer.Option(
            metavar="R",
            help="rehearse this rank; by default, the first of a pipeline's first, second and last stage",
        ),
    ] = None,
    all_kinds: Annotated[
        bool, typer.Option("--all-kinds-of-ranks", help="rehearse every rank whose work differs")
    ] = False,
    gpu: Annotated[
        str | None,
        typer.Option(metavar="GPU", help="the GPU, as in `cluster.gpu`, which is the default; else H100"),
    ] = None,
    search: Annotated[
        bool, typer.Option("--search", help="find the fastest layouts of STAGE whose memory fits the GPU")
    ] = False,
    nodes: Annotated[
        int | None,
        typer.Option(
            metavar="N", min=1, help="number of nodes for --search; as many as STAGE has by default"
        ),
    ] = None,
    report: Annotated[
        Path | None, file_option("write the report of the run with this rehearsal in it", ".html")
    ] = None,
    store: StoreOption = None,
    overrides: SetOption = None,
    as_json: JsonOption = False,
) -> None:
    """Build ranks of the training at their real number of processes and run a step of each, without GPUs:
    memory, collectives, FLOPs and waits, and a predicted time."""
    from apertus_model.rehearsal.records import RankReport
    from flows.cli.tables.rehearsal import show_part
    from flows.execution import rehearsal

    _check(stage, rank, all_kinds, search, nodes, report)
    plan = make_plan(spec, store, overrides, ask_network=False)
    cluster = plan.pipeline.cluster
    chosen = gpu or (cluster.gpu if cluster else DEFAULT_GPU)
    per_node = cluster.gpus_per_node if cluster else DEFAULT_PER_NODE
    parts = rehearsal.parts_to_rehearse(plan.estimates.parts, stage, part)
    if search:
        longest = max(parts, key=lambda estimate: estimate.flops)

        def replan(changes: list[str]) -> Plan:
            return make_plan(spec, store, [*(overrides or []), *changes], ask_network=False)

        _search(longest, plan, chosen, per_node, nodes, as_json, replan)
        return
    kinds: rehearsal.Ranks = "all kinds" if all_kinds else "first, middle and last"
    ranks = kinds if rank is None else rank
    results, known = [], dict[str, RankReport]()
    for estimate in parts:

        def begins(number: int, name: str = estimate.node.name, gpus: int = estimate.gpus) -> None:
            errors.print(f"rehearsing {escape(name)}, rank {number} of {gpus}", soft_wrap=True)

        results.append(rehearsal.rehearse(estimate, chosen, per_node, ranks, begins, known))
        if not as_json:
            show_part(console, results[-1])
    if report is not None:
        _write_report(report, plan, results)
    result = rehearsal.Rehearsal(pipeline=plan.pipeline.name, parts=results)
    if as_json:
        print_json(result.model_dump(mode="json"))
    if not result.builds:
        raise typer.Exit(1)


def _check(
    stage: str | None, rank: int | None, all_kinds: bool, search: bool, nodes: int | None, report: Path | None
) -> None:
    """Raises StageError for options that cannot be combined."""
    if rank is not None and all_kinds:
        raise StageError("--rank and --all-kinds-of-ranks cannot be combined. Fix: leave one out")
    if search and (stage is None or rank is not None or all_kinds):
        fix = "name a STAGE, and leave out --rank and --all-kinds-of-ranks"
        raise StageError(f"--search compares layouts of one stage, and chooses the ranks itself. Fix: {fix}")
    if search and report is not None:
        raise StageError("--report draws ranks, and --search compares layouts. Fix: leave one out")
    if nodes is not None and not search:
        raise StageError("--nodes needs --search. Fix: add --search, or change launch.processes by --set")


def _write_report(target: Path, plan: Plan, results: list[PartResult]) -> None:
    from flows.report import render  # loads plotly

    write(target, render(plan, results), plan)
    errors.print(f"The report of {escape(plan.pipeline.name)} is in {escape(str(target))}", soft_wrap=True)


def _search(
    part: PartEstimate,
    plan: Plan,
    gpu: str,
    per_node: int,
    nodes: int | None,
    as_json: bool,
    replan: Callable[[list[str]], Plan],
) -> None:
    """Searches the layouts of a part, and shows the best. `replan`: plans the recipe with further changes."""
    from flows.cli.tables.rehearsal import show_search
    from flows.execution import layout_search
    from specs.trajectory import phases

    name, of_stage = part.node.name, phases(plan.pipeline, part.node.stage)
    path = next(phase.path for phase in of_stage if phase.name == part.node.phase)

    def accept(layout: Layout) -> PartEstimate | str:
        try:
            changed = replan(layout.overrides(path))
        except SpecError as error:
            return str(error.problems[0])
        return next(estimate for estimate in changed.estimates.parts if estimate.node.name == name)

    with _progress(name) as begins:
        search = layout_search.search(plan.pipeline.name, part, path, gpu, per_node, nodes, accept, begins)
    if as_json:
        print_json(search.model_dump(mode="json"))
    else:
        show_search(console, search)


@contextmanager
def _progress(name: str) -> Iterator[Callable[[int, str], None]]:
    """Shows progress as a bar in a terminal, else as a line for each layout."""
    from flows.execution import layout_search

    columns = TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn()
    with Progress(
        *columns, TimeElapsedColumn(), console=errors, transient=True, disable=not errors.is_terminal
    ) as progress:
        bar = progress.add_task("", total=layout_search.BEST)

        def begins(ready: int, text: str) -> None:
            progress.update(bar, completed=ready, description=f"rehearsing {name}: {text}")
            if not errors.is_terminal:
                errors.print(f"rehearsing {escape(name)}: {escape(text)}", soft_wrap=True)

        yield begins
