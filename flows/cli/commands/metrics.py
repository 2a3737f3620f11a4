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
from flows.planning.plan import Plan
from infra.store import StoreError
from infra.store.files.rows import decode, encode
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
    made = make_plan(spec, store, overrides)
    for stage in stages or []:
        if stage not in made.pipeline.stages:
            raise SpecError.of(
                (), f"there is no stage '{stage}'", did_you_mean(stage, made.pipeline.stages), spec
            )
    rows = collect(made, stages or list(made.pipeline.stages))
    if not rows:
        training = [name for name in made.pipeline.stages if any(node.steps for node in made.graph.of(name))]
        if chosen := [name for name in stages or training if name in training]:
            names = ", ".join(chosen)
            found = f"no training is stored in {made.store.url} yet"
            raise StoreError(f"{names}: {found}, so there are no rows to write")
        fix = f"name some of {', '.join(training)}." if training else ""
        raise SpecError.of((), "only stages that train have rows", fix, spec)
    target = output or Path(f"{made.pipeline.name}-metrics.parquet")
    write(target, as_file(rows, target.suffix.lower()), made)
    console.print(f"{counted(len(rows), 'row is', 'rows are')} in {escape(str(target))}", soft_wrap=True)


def collect(plan: Plan, stages: list[str]) -> list[dict[str, Any]]:
    """The rows of the parts of stages, in order; for an unfinished part, those up to its last checkpoint.
    Nested metrics have names with slashes: `validation/web`."""
    rows = []
    for node in plan.graph.nodes.values():
        if node.stage not in stages or node.end_step is None or plan.graph.duplicate_of(node) is not None:
            continue
        artifact = node.artifact(plan.store)
        steps = [step for step in artifact.checkpoint_steps() if step <= node.end_step]
        if not artifact.complete and not steps:
            continue
        marker = artifact.manifest if artifact.complete else artifact.checkpoint(steps[-1]).marker
        for entry in marker.history:
            data = artifact.store.reader(f"{node.path}/attempts/{entry.path}", entry).bytes()
            about = {
                "run": plan.pipeline.name,
                "stage": node.stage,
                "part": node.name,
                "attempt": entry.path.split("/")[0],
            }
            rows += [{**about, **_flat(row)} for row in decode(data, entry.path)]
    return rows


def as_file(rows: list[dict[str, Any]], ending: str) -> bytes:
    """The rows as the content of a file. In JSON, a number that is not finite is null."""
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


def _flat(row: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in row.items():
        flat |= _flat(value, f"{prefix}{name}/") if isinstance(value, dict) else {f"{prefix}{name}": value}
    return flat
