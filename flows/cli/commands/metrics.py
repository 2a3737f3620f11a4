"""`apertus metrics`: every row of training of a run, as one table."""

from __future__ import annotations

import csv
import io
import json
import math
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape

from flows.cli.app import SetOption, SpecArgument, StoreOption, app, console, make_plan
from flows.cli.output import OUTPUT, file_option, write
from flows.format import is_number
from specs.errors import SpecError, counted, did_you_mean


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
