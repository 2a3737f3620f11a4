"""`apertus branch`, `diff` and `lineage`: branches of training, differences, and origins of artifacts."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from flows.cli.app import (
    JsonOption,
    SetOption,
    SpecArgument,
    StoreOption,
    app,
    console,
    make_plan,
    print_json,
)
from flows.cli.output import OUTPUT, file_option, write
from specs.errors import SpecError, counted

if TYPE_CHECKING:
    from flows.planning.plan import Plan
    from flows.provenance.lineage import Lineage


@app.command()
def branch(
    spec: SpecArgument,
    point: Annotated[
        str,
        typer.Argument(
            metavar="STAGE@REF", help="pretrain@step=1200, pretrain@tokens=7.0T, sft@best:val_loss"
        ),
    ],
    name: Annotated[str, typer.Option("--name", help="name of the new pipeline and its stage")],
    output: Annotated[
        Path | None, file_option("<name>.yaml beside SPEC by default", ".yaml", ".yml", names=OUTPUT)
    ] = None,
    store: StoreOption = None,
    overrides: SetOption = None,
) -> None:
    """Write a small recipe that extends SPEC and continues training from one of its checkpoints, sharing all
    parts before it."""
    from flows.provenance.branch import branch as make_branch

    new = make_branch(spec, point, name, overrides or [], output, store)
    there = "written to" if new.written else "is already in"
    console.print(f"{there} {escape(str(new.path))}:", soft_wrap=True)
    console.print(escape(new.text), highlight=False, soft_wrap=True)
    shared = f"{counted(len(new.shared), 'part is', 'parts are')} shared with {escape(spec)}"
    parts = f"{counted(len(new.parts), 'is', 'are')} new: {escape(', '.join(new.parts))}"
    console.print(f"{shared}, {new.stored} of them stored; {parts}", soft_wrap=True)
    for note in new.notes:
        console.print(f"note: {escape(note)}", soft_wrap=True)


@app.command()
def diff(
    a: Annotated[
        str,
        typer.Argument(
            metavar="A", help="SPEC, SPEC:STAGE, a run, RUN:PART, RUN@TIME, or kind/fingerprint[@step=N]"
        ),
    ],
    b: Annotated[str, typer.Argument(metavar="B", help="as A; :STAGE names another stage of the spec of A")],
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Compare two recipes, stages, runs or artifacts: fields, inputs and stored results side by side."""
    from flows.cli.tables.diff import show as show_diff
    from flows.provenance import diff as differences

    ours, theirs = differences.side(a, store), differences.side(b, store, a)
    compared = differences.compare(ours, theirs)
    if as_json:
        print_json(differences.to_json(ours, theirs, compared))
    else:
        show_diff(console, ours, theirs, compared)


@app.command()
def lineage(
    spec: Annotated[
        str,
        typer.Argument(
            metavar="SPEC", help="the recipe; or, without STAGE: a fingerprint, a run, an exported folder"
        ),
    ],
    stage: Annotated[
        str | None, typer.Argument(metavar="STAGE", help="a stage, or one part of it such as pretrain/2")
    ] = None,
    store: StoreOption = None,
    overrides: SetOption = None,
    files: Annotated[bool, typer.Option("--files", help="list every source file with its SHA-256")] = False,
    picture: Annotated[Path | None, file_option("draw it", ".svg")] = None,
    as_json: JsonOption = False,
) -> None:
    """Show the lineage of a stage or a model, down to the source files, with licences, filters and counts."""
    from flows.cli.tables import lineage as tables
    from flows.provenance import lineage as lineages

    plan = None if stage is None else _planned(spec, stage, store, overrides)
    if stage is None or plan is None:
        traced = _of_stored(spec, store)
    else:
        traced = [lineages.of_plan(plan, [stage] if stage in plan.graph.nodes else plan.graph.ends_of(stage))]
    if picture is not None:
        from flows.provenance.picture import svg  # loads jinja2

        write(picture, svg(traced[0], f"{stage or spec}: what it was made from"), plan)
    if as_json:
        parts = [lineage.to_json(root, files=files) for lineage in traced for root in lineage.roots]
        print_json(parts[0] if len(parts) == 1 else {"name": stage or spec, "parts": parts})
        return
    for lineage in traced:
        for root in lineage.roots:
            console.print(tables.tree(lineage, root))
    console.print(tables.sources_table(traced[0]))
    if (planted := tables.planted_table(traced[0])) is not None:
        console.print(planted)
    if files:
        _print_files(traced[0])
    if picture is not None:
        console.print(f"drawn in {escape(str(picture))}", soft_wrap=True)


def _planned(spec: str, stage: str, store: str | None, overrides: list[str] | None) -> Plan:
    if Path(spec).suffix not in (".yaml", ".yml") and not Path(spec).exists():
        fix = f"for a run, name a part: {spec}:{stage}."
        raise SpecError.of((), "STAGE needs a recipe; this is not a file", fix, spec)
    plan = make_plan(spec, store, overrides)
    plan.named(stage, spec)
    return plan


def _of_stored(text: str, store: str | None) -> list[Lineage]:
    from flows.provenance import lineage as lineages
    from flows.provenance.lookup import find
    from infra.store import Store
    from specs.pipeline import DEFAULT_STORE

    if Path(text).suffix in (".yaml", ".yml"):
        fix = "name one: apertus lineage SPEC STAGE."
        raise SpecError.of((), "a recipe has many stages", fix, text)
    opened = Store.open(store or DEFAULT_STORE)
    return [lineages.of_store(opened, artifact.path, artifact.step) for artifact in find(opened, text)]


def _print_files(lineage: Lineage) -> None:
    from infra.store.inputs import recorded_files

    for source in lineage.sources.values():
        console.print(f"[bold]{escape(source.name)}[/] [dim]{source.digest}[/]", soft_wrap=True)
        rows = recorded_files(lineage.store, source.digest)
        if rows is None:
            console.print("  no files are recorded: a run records them when it reads them", style="dim")
        for row in rows or []:
            line = f"  {row.sha256}  {row.size:>12,}  {row.path}"
            console.print(line, markup=False, highlight=False, soft_wrap=True)
