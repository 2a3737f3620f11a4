"""`apertus logs`: what the stages of a recipe print, from its last attempts or as they run."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.text import Text

from flows.cli.app import SetOption, SpecArgument, StoreOption, app, console, make_plan


@app.command()
def logs(
    spec: SpecArgument,
    stage: Annotated[str | None, typer.Argument(help="a stage or a part; all by default")] = None,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="print lines as they come, until the parts are finished")
    ] = False,
    every: Annotated[bool, typer.Option("--all", help="print every attempt, not the last one only")] = False,
    profile: Annotated[
        str | None,
        typer.Option(envvar="APERTUS_PROFILE", metavar="FILE", help="profile of the cluster that runs it"),
    ] = None,
    store: StoreOption = None,
    overrides: SetOption = None,
) -> None:
    """Print what the stages printed: the last attempt of each part, finished, failed or running on this
    machine."""
    from flows.inspection import logs as inspection
    from specs.profiles import load_profile

    plan = make_plan(spec, store, overrides)
    scratch = load_profile(profile).scratch
    nodes = list(plan.graph.nodes.values()) if stage is None else plan.named(stage, "logs")
    lines = inspection.lines(plan.store, nodes, scratch, every)
    if follow:
        lines = inspection.follow(plan.store, nodes, scratch)
    width = max(len(node.name) for node in nodes) if len(nodes) > 1 else 0
    for part, line in lines:
        label = Text(f"{part:<{width}} | " if width else "", style="dim")
        console.print(label + Text(line), soft_wrap=True, highlight=False)
