"""`apertus init`, a first recipe for the files of a folder, and `plan`, what a run of a recipe would do."""

from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from flows.cli.app import (
    JsonOption,
    ProfileOption,
    SetOption,
    SpecArgument,
    StoreOption,
    app,
    console,
    make_plan,
    print_json,
)
from flows.format import amount
from specs.errors import SpecError, StageError


@app.command()
def init(
    folder: Annotated[Path, typer.Argument(help="the folder with texts, code, JSONL, Parquet, chats")],
    name: Annotated[
        str, typer.Option("--output", "-o", metavar="FILE", help="below the folder")
    ] = "recipe.yaml",
) -> None:
    """Write a recipe for the files in a folder: a small model of them, which trains in minutes."""
    from flows.inspection.first_recipe import look, recipe  # loads pyarrow

    if not folder.is_dir():
        raise SpecError.of((), f"'{folder}' is no folder", "name the folder that has the files.", "FOLDER")
    target = folder / name
    if target.exists():
        fix = "remove it, or name another with --output."
        raise SpecError.of((), f"'{target}' exists, and nothing is overwritten", fix, "--output")
    content = look(folder)
    target.write_text(recipe(content), encoding="utf-8")
    for group in content.groups:
        files = f"{len(group.files)} file{'s' if len(group.files) > 1 else ''}, {amount(group.bytes)}B"
        console.print(f"{escape(group.name)}: {files}, format {group.format}", soft_wrap=True)
    for what, count in sorted(content.left_out.items()):
        console.print(f"left out: {count} of {escape(what)}", soft_wrap=True)
    path = escape(str(target))
    console.print(f"The recipe is {path}. Next: apertus plan {path}, apertus run {path}", soft_wrap=True)


@app.command()
def plan(
    spec: SpecArgument,
    store: StoreOption = None,
    overrides: SetOption = None,
    check_sources: Annotated[
        bool,
        typer.Option("--check-sources", help="also look for declared inputs at remote URLs"),
    ] = False,
    against: Annotated[
        str | None,
        typer.Option(metavar="SPEC", help="show the differences to another recipe"),
    ] = None,
    details: Annotated[
        bool,
        typer.Option(
            "--details", help="show each part, variant and use of data, memory by part, and checkpoints"
        ),
    ] = False,
    profile: ProfileOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show what a run would do with every stage, why, and what it needs. Changes nothing."""
    from flows.cli.tables.estimate import show_comparison
    from flows.cli.tables.plan import show_plan
    from flows.execution.cluster_check import cluster_notes
    from flows.planning.comparison import compare
    from specs.profiles import load_profile

    cluster = load_profile(profile)
    planned = make_plan(spec, store, overrides, check_sources)
    try:
        planned.graph.notes += cluster_notes(planned, cluster, planned.pipeline.stages)
    except StageError as error:  # a run would be refused; a plan can be made anywhere
        planned.graph.notes.append(str(error))
    if against is not None:
        other = make_plan(against, store, None, check_sources)
        comparison = compare(planned, other)
        if as_json:
            print_json(comparison.to_json())
        else:
            names = (planned.pipeline.name, other.pipeline.name)
            show_comparison(console, comparison, *(names if len(set(names)) == 2 else (spec, against)))
        return
    if as_json:
        from flows.inspection.goldfish import masked_by_hash  # loads numpy

        print_json(planned.to_json(masked_by_hash))
        return
    show_plan(console, planned, details)
