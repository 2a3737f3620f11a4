"""`apertus plan`: what a run would do, and how two recipes differ."""

from __future__ import annotations

from typing import Annotated

import typer

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
    as_json: JsonOption = False,
) -> None:
    """Show what a run would do with every stage, why, and what it needs. Changes nothing."""
    from flows.cli.tables.estimate import show_comparison
    from flows.cli.tables.plan import show_plan
    from flows.planning.comparison import compare

    planned = make_plan(spec, store, overrides, check_sources)
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
