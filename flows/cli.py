"""The `apertus` command line.

Invariants: planning, status, lineage and report import neither torch nor Prefect. A user's mistake is printed as a message with exit
code 2; a run that fails, or an error that nobody expected, ends with 1, a run that is interrupted with 130. Tracebacks are printed with
`--debug` only.
"""

from __future__ import annotations

import io
import json
import logging
import os
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from flows import interrupts, plan_tables, terminal
from flows.commands import keeping, metrics, trace, verify  # noqa: F401  # they register their commands on `app`
from flows.commands.app import JsonOption, SetOption, SpecArgument, StoreOption, app, console, errors, make_plan, print_json
from flows.nearest import Records
from flows.plan import Plan, make
from flows.selection import select
from specs.profile import load_profile
from specs.redaction import RedactedRecord, redacted
from specs.schema import json_schema


@app.command()
def plan(
    spec: SpecArgument,
    store: StoreOption = None,
    overrides: SetOption = None,
    check_sources: Annotated[bool, typer.Option("--check-sources", help="ask remote urls too whether what is declared is there")] = False,
    against: Annotated[str | None, typer.Option(metavar="SPEC", help="another recipe: show what differs, in place of the plan")] = None,
    details: Annotated[bool, typer.Option("--details", help="each part, variant and passage of data; memory by part; checkpoints")] = False,
    as_json: JsonOption = False,
) -> None:
    """Say what a run would do with every stage, why, and what it takes. Changes nothing."""
    made = make_plan(spec, store, overrides, check_sources)
    from flows import estimate_tables as tables
    from flows.against import compare

    if against is not None:
        other = make_plan(against, store, None, check_sources)
        comparison = compare(made, other)
        if as_json:
            print_json(comparison.to_json())
        else:
            names = (made.pipeline.name, other.pipeline.name)
            tables.show_comparison(console, comparison, *(names if len(set(names)) == 2 else (spec, against)))
        return
    if as_json:
        from flows.estimate.goldfish import masked_by_hash

        print_json(made.to_json(masked_by_hash))
        return
    plan_tables.show_plan(console, made, details)


@app.command()
def run(
    spec: SpecArgument,
    store: StoreOption = None,
    overrides: SetOption = None,
    until: Annotated[str | None, typer.Option(help="run this stage and what it needs")] = None,
    only: Annotated[str | None, typer.Option(help="run this stage alone; what it reads must be finished")] = None,
    name: Annotated[str | None, typer.Option(help="name of the run, under which `gc` keeps it; the recipe's by default")] = None,
    profile: Annotated[
        str | None,
        typer.Option(
            envvar="APERTUS_PROFILE", metavar="FILE", help="facts about the cluster that stages run on; this machine alone by default"
        ),
    ] = None,
) -> None:
    """Run what is not finished, in order. Run it again after any interruption: it resumes from what is stored."""
    load_profile(profile)
    os.environ["APERTUS_PROFILE"] = profile or ""
    overrides = [*(overrides or []), *([f"name={name}"] if name else [])]
    made = make_plan(spec, store, overrides)
    chosen = select(made, until, only)
    pending = [step for step in made.pending if step.node.stage in chosen]
    parts = sum(step.node.stage in chosen for step in made.steps.values())
    if not pending:
        records = Records(made.store, made.pipeline.name)
        records.keep(made.graph, made.pipeline.model_dump(mode="json", by_alias=True))
        for node in (node for node in made.graph.nodes.values() if made.pipeline.stages[node.stage].protect):
            records.protect(node)
        all_of_it = until is None and only is None
        which = f"All {parts} parts" if all_of_it else f"The chosen parts ({parts} of {len(made.steps)})"
        console.print(f"{which} of {made.pipeline.name} are finished; nothing to run.")
        terminal.outro(console, made, spec, store, overrides)
        return
    console.print(plan_tables.plan_table(made, chosen=chosen, width=console.width))
    _run(made, spec, overrides, until, only, parts)
    terminal.outro(console, make(made.pipeline, made.store), spec, store, overrides)


def _run(made: Plan, spec: str, overrides: list[str] | None, until: str | None, only: str | None, total: int) -> None:
    """Starts Prefect in this process and the flow in it."""
    interrupts.listen()
    try:
        console.print("starting Prefect ...", style="dim")
        from flows.pipeline import PipelineFailed, run_here
        from flows.server import start_prefect

        interrupts.check()
        start_prefect()
        with terminal.watcher(console, total) as observer:
            run_here(observer, spec=spec, overrides=overrides or [], until=until, only=only, store=made.store.url)
    except KeyboardInterrupt:  # perhaps in the middle of the imports
        interrupts.ignore()
        errors.print("interrupted; what was committed is kept, the same command resumes from there.")
        raise typer.Exit(130) from None
    except PipelineFailed as error:
        for line in str(error).splitlines():
            errors.print(f"[red]failed:[/] {escape(redacted(line))}", soft_wrap=True)
        raise typer.Exit(1) from None


@app.command()
def status(spec: SpecArgument, store: StoreOption = None, overrides: SetOption = None, as_json: JsonOption = False) -> None:
    """Show what is stored of every part: state, results, seconds of start-up, compute and storage."""
    made = make_plan(spec, store, overrides)
    if as_json:
        print_json({"pipeline": made.pipeline.name, "store": made.store.url, "parts": terminal.status_rows(made)})
    else:
        console.print(terminal.status_table(made, console.width))


@app.command()
def report(
    spec: SpecArgument,
    output: Annotated[Path | None, typer.Option("--output", "-o", metavar="FILE", help="<pipeline>-report.html by default")] = None,
    store: StoreOption = None,
    overrides: SetOption = None,
) -> None:
    """Write one HTML file that shows the whole run: stages, training, data, evaluations, lineage. Reads the store only."""
    from flows.report import render

    made = make_plan(spec, store, overrides)
    target = output or Path(f"{made.pipeline.name}-report.html")
    target.write_text(render(made), encoding="utf-8")
    console.print(f"The report of {escape(made.pipeline.name)} is in {escape(str(target))}", soft_wrap=True)


@app.command()
def inspect(
    spec: SpecArgument,
    name: Annotated[str, typer.Argument(metavar="NAME", help="a part of a corpus, a mixture, or a stage of training")],
    step: Annotated[int | None, typer.Option(help="of training, from 1; the first by default")] = None,
    sample: Annotated[int | None, typer.Option(min=0, help="one training sample by its index, in place of a step")] = None,
    limit: Annotated[int, typer.Option(min=1, help="samples to show, or examples of each reason")] = 2,
    reason: Annotated[str | None, typer.Option(help="why documents were dropped: the label of a filter; or kept, replaced")] = None,
    samples: Annotated[int, typer.Option(min=1, help="over which the shares of a mixture are counted")] = 100_000,
    html: Annotated[Path | None, typer.Option(metavar="FILE", help="write what would be printed as a page")] = None,
    store: StoreOption = None,
    overrides: SetOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show data: what a corpus kept and dropped and why, the shares of a mixture, or the samples of a step as the model sees them."""
    from flows.inspect import inspector_of
    from flows.inspection import Options

    made = make_plan(spec, store, overrides)
    options = Options(step, sample, limit, samples, reason)
    inspector, node = inspector_of(made, name, options)
    found = inspector.collect(made, node, options)
    if as_json:
        print_json(found)
    elif html is not None:
        page = terminal.make_console(record=True, width=140, file=io.StringIO())
        inspector.show(page, found)
        page.save_html(str(html))
        console.print(f"{escape(name)} is shown in {escape(str(html))}", soft_wrap=True)
    else:
        inspector.show(console, found)


@app.command()
def schema(output: Annotated[Path | None, typer.Option("--output", "-o", help="write here instead of printing")] = None) -> None:
    """Print the JSON Schema of a pipeline file, which editors use to complete and check it."""
    text = json.dumps(json_schema(), indent=1, sort_keys=True) + "\n"
    if output is None:
        sys.stdout.write(text)
    else:
        output.write_text(text)


def main() -> None:
    logging.setLogRecordFactory(RedactedRecord)
    try:
        app()
    except BrokenPipeError:
        sys.exit(1)


if __name__ == "__main__":
    main()
