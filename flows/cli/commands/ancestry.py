"""`apertus branch`, `diff` and `lineage`: branches of training, differences, and origins of artifacts."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

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

    made = make_branch(spec, point, name, overrides or [], output, store)
    console.print(
        f"{'written to' if made.written else 'is already in'} {escape(str(made.path))}:", soft_wrap=True
    )
    console.print(escape(made.text), highlight=False, soft_wrap=True)
    counts = (
        f"{counted(len(made.shared), 'part is', 'parts are')} shared with {escape(spec)}, {made.stored} of"
        f" them stored; {counted(len(made.new), 'is', 'are')} new: "
    )
    console.print(counts + escape(", ".join(made.new)), soft_wrap=True)
    for note in made.notes:
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

    one, other = differences.side(a, store), differences.side(b, store, a)
    found = differences.compare(one, other)
    if as_json:
        print_json(differences.to_json(one, other, found))
    else:
        show_diff(console, one, other, found)


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
    from flows.provenance import lineage as lineages
    from flows.provenance.picture import svg

    if stage is None:
        made, found = None, _of_stored(spec, store)
    else:
        made = _planned(spec, stage, store, overrides)
        names = [stage] if stage in made.graph.nodes else made.graph.ends_of(stage)
        found = [lineages.of_plan(made, names)]
    if picture is not None:
        write(picture, svg(found[0], f"{stage or spec}: what it was made from"), made)
    if as_json:
        print_json(_json(found, stage or spec, files))
        return
    for one in found:
        for root in one.roots:
            console.print(lineages.tree(one, root))
    console.print(lineages.sources_table(found[0]))
    if (planted := lineages.planted_table(found[0])) is not None:
        console.print(planted)
    if files:
        _print_files(found[0])
    if picture is not None:
        console.print(f"drawn in {escape(str(picture))}", soft_wrap=True)


def _planned(spec: str, stage: str, store: str | None, overrides: list[str] | None) -> Plan:
    if Path(spec).suffix not in (".yaml", ".yml") and not Path(spec).exists():
        fix = f"for a run, name a part: {spec}:{stage}."
        raise SpecError.of((), "STAGE needs a recipe; this is not a file", fix, spec)
    made = make_plan(spec, store, overrides)
    made.named(stage, spec)
    return made


def _of_stored(text: str, store: str | None) -> list[Lineage]:
    from flows.provenance import lineage as lineages
    from flows.provenance.lookup import find
    from infra.store import Store
    from specs.pipeline import DEFAULT_STORE

    if Path(text).suffix in (".yaml", ".yml"):
        fix = "name one: apertus lineage SPEC STAGE."
        raise SpecError.of((), "a recipe has many stages", fix, text)
    opened = Store.open(store or DEFAULT_STORE)
    return [lineages.of_store(opened, found.path, found.step) for found in find(opened, text)]


def _json(found: list[Lineage], name: str, files: bool) -> dict[str, Any]:
    from flows.provenance import lineage as lineages

    parts = [lineages.to_json(one, root, files=files) for one in found for root in one.roots]
    return parts[0] if len(parts) == 1 else {"name": name, "parts": parts}


def _print_files(found: Lineage) -> None:
    from flows.provenance import lineage as lineages

    for source in lineages.file_rows(found):
        console.print(f"[bold]{escape(source['name'])}[/] [dim]{source['digest']}[/]", soft_wrap=True)
        if source["files"] is None:
            console.print("  no files are recorded: a run records them when it reads them", style="dim")
        for row in source["files"] or []:
            console.print(
                f"  {row['sha256']}  {row['size']:>12,}  {row['path']}",
                markup=False,
                highlight=False,
                soft_wrap=True,
            )
