"""The end of the output of `apertus run`: anomalies, the folder of the model, three commands to continue."""

import shlex
import sys
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from flows.planning.plan import Plan
from flows.stored_part import StoredPart
from infra.store import StoreError
from specs.anomalies import remark
from specs.redaction import redacted


def show_next_steps(console: Console, plan: Plan, spec: str, store: str | None, overrides: list[str]) -> None:
    """Prints the model's folder, and three commands for the same store, recipe and overrides."""
    show_anomalies(console, plan)
    exports = [
        step.node
        for step in plan.steps.values()
        if step.node.kind == "export" and step.node.name == step.node.stage and step.action == "reuse"
    ]
    for node in exports:
        try:
            artifact = node.artifact(plan.store)
            folder = plan.store.location(artifact.stored_name("config.json").rsplit("/", 1)[0])
        except (StoreError, KeyError):
            continue
        there = f"[bold]{escape(node.name)}[/]: the model is in\n  {escape(_short(folder))}"
        console.print(there, soft_wrap=True)
    installed = Path(sys.argv[0]).name == "apertus"
    program = shlex.quote(_short(sys.argv[0])) if installed else "python -m flows.cli"
    last = exports[-1].stage if exports else next(reversed(plan.pipeline.stages))
    chosen = ["--store", store] if store else []
    chosen += [word for override in overrides for word in ("--set", override)]
    recipe, options = shlex.quote(spec), "".join(f" {shlex.quote(redacted(option))}" for option in chosen)
    commands = [f"status {recipe}{options}", f"lineage {recipe} {last}{options}"]
    for phase, trajectory in reversed(plan.graph.trajectories.items()):
        lr = trajectory.settings.optimizer.lr
        if phase == trajectory.stage and lr and trajectory.trains:
            commands.append(f"plan {recipe}{options} --set stages.{phase}.optimizer.lr={lr / 2:g}")
            break
    console.print("Next:")
    for command in commands:
        console.print(escape(f"  {program} {command}"), soft_wrap=True)


def show_anomalies(console: Console, plan: Plan) -> None:
    """Prints a remark for each finished part of training that met anomalies."""
    for step in plan.steps.values():
        part = StoredPart(step.node.artifact(plan.store), step.node.name)
        if step.node.end_step is not None and (text := remark(part.facts)):
            console.print(f"[yellow]note[/] {escape(part.name)}: {escape(text)}", soft_wrap=True)


def _short(path: str) -> str:
    """A local path, relative to the working folder if it is below it; a URL unchanged."""
    if "://" in path:
        return path
    try:
        return str(Path(path).resolve().relative_to(Path.cwd()))
    except ValueError:
        return path
