"""`apertus status`, `logs`, `inspect`, `metrics`, `report` and `schema`."""

import csv
import io
import json
import math
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.text import Text

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
from flows.cli.output import OUTPUT, file_option, write
from flows.format import is_number
from flows.terminal import make_console
from specs.errors import SpecError, counted, did_you_mean


@app.command()
def status(
    spec: SpecArgument, store: StoreOption = None, overrides: SetOption = None, as_json: JsonOption = False
) -> None:
    """Show the stored state of every part: results, and seconds of start-up, compute and storage."""
    from flows.cli.tables.runs import status_table
    from flows.stored_part import planned_parts

    plan = make_plan(spec, store, overrides)
    if as_json:
        parts = [part.to_json() for part in planned_parts(plan).values()]
        print_json({"pipeline": plan.pipeline.name, "store": plan.store.url, "parts": parts})
    else:
        console.print(status_table(plan, console.width))


@app.command()
def report(
    spec: SpecArgument,
    output: Annotated[
        Path | None, file_option("<pipeline>-report.html by default", ".html", names=OUTPUT)
    ] = None,
    open_it: Annotated[bool, typer.Option("--open", help="show it in the browser")] = False,
    store: StoreOption = None,
    overrides: SetOption = None,
) -> None:
    """Write one HTML file about the whole run: stages, training, data, evaluations, lineage. Only reads the
    store."""
    import webbrowser

    from flows.report import render  # loads plotly

    plan = make_plan(spec, store, overrides)
    target = output or Path(f"{plan.pipeline.name}-report.html")
    write(target, render(plan), plan)
    console.print(f"The report of {escape(plan.pipeline.name)} is in {escape(str(target))}", soft_wrap=True)
    if open_it and not webbrowser.open(target.absolute().as_uri()):
        console.print("No browser was found here that could show it.")


@app.command()
def inspect(
    spec: SpecArgument,
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME",
            help="a part of a corpus, of conversations or of preference data, a mixture, or a training stage",
        ),
    ],
    step: Annotated[
        int | None, typer.Option(help="training step, counted from 1; the first by default")
    ] = None,
    sample: Annotated[
        int | None, typer.Option(min=0, help="one training sample, or one row, by its index")
    ] = None,
    limit: Annotated[int, typer.Option(min=1, help="samples to show, or examples of each reason")] = 2,
    reason: Annotated[
        str | None, typer.Option(help="why documents were dropped: the label of a filter; or kept, replaced")
    ] = None,
    document: Annotated[
        str | None,
        typer.Option(metavar="ID", help="id, URL or hash of a document of a corpus: what became of it"),
    ] = None,
    samples: Annotated[
        int, typer.Option(min=1, help="number of samples over which the shares of a mixture are counted")
    ] = 100_000,
    html: Annotated[Path | None, file_option("write an HTML page instead of printing", ".html")] = None,
    store: StoreOption = None,
    overrides: SetOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show data: what a corpus kept and dropped and why, the shares of a mixture, conversations, prompts with
    completions and rewards, pairs, or the samples of a step as the model sees them."""
    from flows.inspection.common import Options
    from flows.inspection.inspectors import inspector_of

    plan = make_plan(spec, store, overrides)
    options = Options(step, sample, limit, samples, reason, document)
    inspector, node = inspector_of(plan, name, options)
    shown = inspector.collect(plan, node, options)
    if as_json:
        print_json(shown)
    elif html is not None:
        page = make_console(record=True, width=140, file=io.StringIO())
        inspector.show(page, shown)
        write(html, page.export_html(), plan)
        console.print(f"{escape(name)} is shown in {escape(str(html))}", soft_wrap=True)
    else:
        inspector.show(console, shown)


@app.command()
def logs(
    spec: SpecArgument,
    stage: Annotated[str | None, typer.Argument(help="a stage or a part; all by default")] = None,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="print lines as they come, until the parts are finished")
    ] = False,
    every: Annotated[bool, typer.Option("--all", help="print every attempt, not the last one only")] = False,
    profile: ProfileOption = None,
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


@app.command("metrics")
def metrics_command(
    spec: SpecArgument,
    stages: Annotated[
        list[str] | None, typer.Argument(metavar="[STAGE]...", help="all stages that train by default")
    ] = None,
    output: Annotated[
        Path | None,
        file_option(
            "or .csv or .jsonl; <pipeline>-metrics.parquet by default",
            *(".parquet", ".csv", ".jsonl"),
            names=OUTPUT,
        ),
    ] = None,
    store: StoreOption = None,
    overrides: SetOption = None,
) -> None:
    """Write the stored rows of training as a table: run, stage, part, attempt, step, and a column per
    metric."""
    from flows.stored_part import training_rows
    from infra.store import StoreError

    plan = make_plan(spec, store, overrides)
    for stage in stages or []:
        if stage not in plan.pipeline.stages:
            raise SpecError.of(
                (), f"there is no stage '{stage}'", did_you_mean(stage, plan.pipeline.stages), spec
            )
    rows = training_rows(plan, stages or plan.pipeline.stages)
    if not rows:
        training = [name for name in plan.pipeline.stages if any(node.steps for node in plan.graph.of(name))]
        if chosen := [name for name in stages or training if name in training]:
            names = ", ".join(chosen)
            nothing = f"no training is stored in {plan.store.url} yet"
            raise StoreError(f"{names}: {nothing}, so there are no rows to write")
        fix = f"name some of {', '.join(training)}." if training else ""
        raise SpecError.of((), "only stages that train have rows", fix, spec)
    target = output or Path(f"{plan.pipeline.name}-metrics.parquet")
    write(target, as_file(rows, target.suffix.lower()), plan)
    console.print(f"{counted(len(rows), 'row is', 'rows are')} in {escape(str(target))}", soft_wrap=True)


def as_file(rows: list[dict[str, Any]], ending: str) -> bytes:
    """The rows as the content of a file. In JSON, a number that is not finite is null."""
    from infra.store.files.rows import encode

    text = io.StringIO()
    if ending == ".parquet":
        return encode(rows)
    if ending == ".csv":
        names = dict.fromkeys(name for row in rows for name in row)
        writer = csv.DictWriter(text, names, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    else:
        for row in rows:
            infinite = {name for name, value in row.items() if is_number(value) and not math.isfinite(value)}
            text.write(json.dumps(row | dict.fromkeys(infinite), allow_nan=False) + "\n")
    return text.getvalue().encode()


@app.command()
def schema(
    recipes: Annotated[
        list[Path] | None,
        typer.Argument(metavar="[RECIPE]...", help="recipes whose first line shall name the schema"),
    ] = None,
    output: Annotated[
        Path | None, file_option("file to write to instead of printing", ".json", names=OUTPUT)
    ] = None,
) -> None:
    """Print the JSON Schema of a pipeline file, or write the line by which editors find it into recipes."""
    from specs.document import read
    from specs.schema import json_schema, with_editor_line

    for recipe in recipes or ():
        read(recipe)
        recipe.write_text(with_editor_line(recipe.read_text(encoding="utf-8")), encoding="utf-8")
        console.print(f"{escape(str(recipe))}: editors complete and check it", soft_wrap=True)
    if recipes:
        return
    text = json.dumps(json_schema(), indent=1, sort_keys=True) + "\n"
    if output is None:
        sys.stdout.write(text)
    else:
        write(output, text)
