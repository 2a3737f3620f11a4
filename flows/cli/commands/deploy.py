"""`apertus deploy`: registers a recipe with a Prefect server, whose workers then run it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape

from flows.cli.app import SetOption, SpecArgument, app, console
from infra.imports import quick_imports
from specs.errors import SpecError, did_you_mean


@app.command()
def deploy(
    spec: SpecArgument,
    pool: Annotated[str, typer.Option(help="the work pool whose workers run it")] = "local",
    name: Annotated[str | None, typer.Option(help="of the deployment; the recipe's by default")] = None,
    overrides: SetOption = None,
    until: Annotated[str | None, typer.Option(help="run this stage and its inputs")] = None,
    store: Annotated[
        str | None, typer.Option("--store", help="URL of the store; wins over the spec's")
    ] = None,
    cron: Annotated[
        str | None, typer.Option(metavar="SCHEDULE", help='when to run by itself, in UTC: "0 3 * * *"')
    ] = None,
    tag: Annotated[list[str] | None, typer.Option(help="a tag beside the recipe's name")] = None,
) -> None:
    """Register a recipe with the Prefect server of PREFECT_API_URL. A worker of the pool runs it when it is
    asked to, or by a schedule."""
    from specs.recipe import load

    recipe = load(spec, overrides or [])
    if until is not None and until not in recipe.stages:
        fix = did_you_mean(until, recipe.stages)
        raise SpecError.of((), f"there is no stage '{until}'", fix, "--until")
    if not os.environ.get("PREFECT_API_URL"):
        fix = "start one with prefect server start, and export PREFECT_API_URL=http://127.0.0.1:4200/api."
        raise SpecError.of((), "no Prefect server is named", fix, "PREFECT_API_URL")
    parameters: dict[str, Any] = {"spec": str(Path(spec).resolve())}
    parameters |= {"overrides": overrides} if overrides else {}
    parameters |= {"until": until} if until else {}
    parameters |= {"store": store} if store else {}
    with quick_imports():
        from flows.execution import deployments
        from flows.execution.server import start_prefect
    start_prefect()
    deployment = deployments.deploy(
        name or recipe.name, pool, parameters, cron, [recipe.name, *(tag or [])], recipe.description
    )
    when = f"It runs at {cron} (UTC)." if cron else f"Start a run: prefect deployment run {deployment}"
    console.print(f"Deployed {escape(deployment)}. {escape(when)}", soft_wrap=True)
