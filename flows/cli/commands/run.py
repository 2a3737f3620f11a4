"""`apertus run`, which runs a recipe in this process, and `deploy`, which has a worker of Prefect run it."""

from __future__ import annotations

import os
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape

from flows.cli.app import ProfileOption, SetOption, SpecArgument, StoreOption, app, console, errors, make_plan
from infra.imports import quick_imports
from specs.errors import SpecError, did_you_mean
from specs.redaction import redacted

if TYPE_CHECKING:
    from flows.planning.plan import Plan
    from specs.profiles import Profile


@app.command()
def run(
    spec: SpecArgument,
    store: StoreOption = None,
    overrides: SetOption = None,
    until: Annotated[str | None, typer.Option(help="run this stage and its inputs")] = None,
    only: Annotated[str | None, typer.Option(help="run only this stage; its inputs must be finished")] = None,
    name: Annotated[
        str | None, typer.Option(help="name of the run, under which `gc` keeps it; the recipe's by default")
    ] = None,
    profile: ProfileOption = None,
) -> None:
    """Run all unfinished parts, in order. Repeat the command after any interruption: it resumes from stored
    results."""
    from flows.cli.next_steps import show_next_steps
    from flows.cli.tables.plan import plan_table, show_item
    from flows.execution.cluster_check import cluster_notes
    from flows.planning.run_records import Records
    from flows.planning.stage_choice import select
    from infra.store.documents import RunEnd
    from specs.profiles import load_profile

    cluster = load_profile(profile)
    overrides = [*(overrides or []), *([f"name={name}"] if name else [])]
    plan = make_plan(spec, store, overrides)
    chosen = select(plan, until, only, profile=cluster)
    pending = [step for step in plan.pending if step.node.stage in chosen]
    parts = sum(step.node.stage in chosen for step in plan.steps.values())
    if not pending:
        records = Records(plan.store, plan.pipeline.name)
        all_of_it = until is None and only is None
        now = datetime.now(UTC).isoformat(timespec="seconds")
        end = RunEnd(outcome="finished", started=now, seconds=0.0) if all_of_it else None
        records.keep(plan.graph, plan.pipeline.to_json(), end)
        for node in (node for node in plan.graph.nodes.values() if plan.pipeline.stages[node.stage].protect):
            records.protect(node)
        which = f"All {parts} parts" if all_of_it else f"The chosen parts ({parts} of {len(plan.steps)})"
        console.print(f"{which} of {plan.pipeline.name} are finished; nothing to run.")
        show_next_steps(console, plan, spec, store, overrides)
        return
    notes = cluster_notes(plan, cluster, chosen)
    console.print(plan_table(plan, chosen=chosen, width=console.width))
    for note in notes:
        show_item(console, "note", note)
    finished = _run(plan, spec, overrides, until, only, parts, cluster)
    show_next_steps(console, finished, spec, store, overrides)


def _run(
    plan: Plan,
    spec: str,
    overrides: list[str] | None,
    until: str | None,
    only: str | None,
    total: int,
    profile: Profile,
) -> Plan:
    """Starts Prefect in this process and runs the flow; returns the plan after the run."""
    from flows.cli.live import watcher
    from flows.cli.next_steps import show_anomalies
    from flows.execution import interrupts
    from flows.execution.runner import PipelineFailed

    interrupts.listen()
    try:
        console.print("starting Prefect ...", style="dim")
        with quick_imports():
            from flows.execution.flow import run_here
            from flows.execution.server import start_prefect

        interrupts.check()
        start_prefect()
        with watcher(console, total) as observer:
            return run_here(
                plan,
                observer,
                profile,
                spec=spec,
                overrides=overrides or [],
                until=until,
                only=only,
                store=plan.store.url,
            )
    except KeyboardInterrupt:  # perhaps in the middle of the imports
        interrupts.ignore()
        errors.print("interrupted; committed results are kept, the same command resumes from them.")
        raise typer.Exit(130) from None
    except PipelineFailed as error:
        for line in str(error).splitlines():
            errors.print(f"[red]failed:[/] {escape(redacted(line))}", soft_wrap=True)
        show_anomalies(console, plan)
        raise typer.Exit(1) from None


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
