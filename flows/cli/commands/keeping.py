"""`apertus runs`, `forget`, `gc` and `cp`: retention and copies of a store."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from flows.cli.app import JsonOption, SetOption, StoreOption, app, console, print_json
from specs.errors import counted

if TYPE_CHECKING:
    from infra.store import Store


def _existing(store: str | None) -> Store:
    """Opens an existing store. StoreError if there is none."""
    from infra.store import Store, StoreError
    from specs.pipeline import DEFAULT_STORE

    opened = Store.open(store or DEFAULT_STORE)
    if not opened.exists("format.json"):
        raise StoreError(f"there is no store at {opened.url}; name one with --store")
    return opened


@app.command("runs")
def list_runs(
    metrics: Annotated[
        list[str] | None,
        typer.Option(
            "--metrics",
            metavar="NAME",
            help="show metrics instead: perplexity, evaluate-base:perplexity, 'sft:*'; repeatable",
        ),
    ] = None,
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """List the named runs of a store, which `gc` keeps: how each ended, or its metrics, the smallest value of
    the first metric first. `apertus diff` compares two of them."""
    from flows.cli.tables.runs import named_runs, runs_table

    opened = _existing(store)
    named = named_runs(opened, metrics or ())
    if as_json:
        print_json({"store": opened.url, "runs": [asdict(run) for run in named]})
    else:
        console.print(runs_table(opened, named))


@app.command()
def forget(
    name: Annotated[str, typer.Argument(metavar="RUN", help="one of `apertus runs`")],
    store: StoreOption = None,
) -> None:
    """Drop the name of a run. The next `gc` removes what no other run reaches."""
    from infra.store import runs

    opened = _existing(store)
    forgotten = f"the run {escape(name)} is forgotten ({counted(runs.forget(opened, name), 'record')})"
    console.print(f"{forgotten}; `apertus gc` shows what no other run reaches")


@app.command()
def gc(
    store: StoreOption = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="show what would be removed; the default without --yes")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", help="remove the files shown")] = False,
    grace: Annotated[
        str, typer.Option(metavar="TIME", help="keep files younger than this: 90s, 30m, 2h, 1d")
    ] = "1d",
    as_json: JsonOption = False,
) -> None:
    """Show the files that no named run reaches; remove them with --yes."""
    from flows.cli.tables.garbage import garbage_json, remove, seconds_of, show_garbage
    from infra.store.maintenance.garbage import survey

    opened = _existing(store)
    seconds = seconds_of(grace)
    garbage = survey(opened, grace=seconds)
    removing = yes and not dry_run and bool(garbage.items)
    if not as_json:
        show_garbage(console, opened, garbage, grace, removing=removing)
    freed = remove(console, opened, seconds, quiet=as_json) if removing else 0
    if as_json:
        print_json(garbage_json(opened, garbage) | {"removed_bytes": freed})


@app.command()
def cp(
    what: Annotated[
        str, typer.Argument(metavar="SPEC|RUN", help="a recipe, or a run that `apertus runs` lists")
    ],
    target: Annotated[str, typer.Argument(metavar="TARGET_STORE", help="folder or fsspec URL")],
    stages: Annotated[
        list[str] | None,
        typer.Option("--stages", help="only this stage and its lineage; repeatable"),
    ] = None,
    store: StoreOption = None,
    overrides: SetOption = None,
) -> None:
    """Copy a run with its lineage to another store, and compare every file with its digest. Repeat the
    command after an interruption."""
    from flows.provenance.run_copy import transfer

    transfer(console, what, target, stages or [], store, overrides or [])
