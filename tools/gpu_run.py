"""Runs a recipe, and all from one stage on once more in a second store: killed in that stage, and resumed.
Writes a page with curves, speeds, and whether both have the same bits.

    python -m tools.gpu_run FOLDER    # specs/recipes/gpu.yaml; FOLDER gets two stores (20 GB) and the report
    python -m tools.gpu_run FOLDER --recipe specs/recipes/smoke.yaml --stage cooldown --page FOLDER/page.md

Invariant: the second store begins with the committed files of parts that do not depend on the stage, and with
no other files.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from flows.format import amount, duration
from flows.planning.plan import Plan, make
from flows.report import render
from flows.report.figures import STAGE_COLOURS, Styles
from flows.report.history import curve
from flows.report.training_charts import OWN_LOSS
from flows.stored_part import planned_part, planned_parts
from infra.store import Store
from specs.base import flatten
from specs.recipe import load
from tests.e2e.conftest import ROOT, Run
from tools.gpu_check import machine
from tools.picture import LINE, as_svg, svg_text
from tools.record import stamp, table

PAGE = ROOT / "docs" / "gpu_run.md"
BEGINS = 900.0  # seconds until the second run has a checkpoint to be killed after
WIDTH, HEIGHT, LEFT, TOP = 640, 260, 48, 16  # pixels of the curves, without their margins
SPEEDS = ("seconds", "per_second", "ms_per_step")
TIMED = ("metrics.json", "README.md")  # of evaluations and exports
HEADINGS = (
    "stage",
    "start-up",
    "work",
    "storage",
    "tokens",
    "tokens/s at the end",
    "median of the peak",
)


class Recipe(NamedTuple):
    """A recipe with `--set` overrides."""

    file: str
    overrides: list[str]

    def plan(self, store: Path, *more: str) -> Plan:
        return make(load(ROOT / self.file, [*self.overrides, *more]), Store.open(str(store)))

    def start(self, store: Path) -> Run:
        return Run(store.parent, "run", self.file, "--store", str(store), overrides=self.overrides)


def finish(run: Run) -> None:
    """Waits for the end of a run. RuntimeError, with its last lines, if it failed."""
    if run.wait(timeout=7200):
        raise RuntimeError("\n".join(run.text.splitlines()[-40:]))


def dependent(plan: Plan, stage: str) -> list[str]:
    """The parts of a stage, and those that are made from them, inputs first."""
    again: list[str] = []
    for name, node in plan.graph.nodes.items():
        if node.stage == stage or {*again} & {*plan.graph.parents(node)}:
            again.append(name)
    return again


def share(plan: Plan, store: Path, stage: str) -> None:
    """Makes a store with the parts of a finished run that do not depend on a stage. Committed files are never
    rewritten, so both stores have the same ones on disk."""

    def place(source: str, target: str) -> None:
        if "/attempts/" in source:
            os.link(source, target)
        else:
            shutil.copy2(source, target)

    again = {plan.graph.nodes[name].path for name in dependent(plan, stage)}
    root = Path(plan.store.root)

    def left_out(folder: str, names: list[str]) -> list[str]:
        below = Path(folder).relative_to(root)
        return [name for name in names if (below / name).as_posix() in {*again, "runs"}]

    shutil.copytree(root, store, copy_function=place, ignore=left_out)


def kill_and_resume(recipe: Recipe, store: Path, stage: str) -> str:
    """Runs a recipe, kills all its processes after the first checkpoint of a stage, and runs it again to its
    end. Returns where it was killed, in words."""
    plan = recipe.plan(store)
    node = plan.graph.of(stage)[0]
    artifact = node.artifact(plan.store)
    run = recipe.start(store)
    run.wait_for(lambda: bool(artifact.checkpoint_steps()), BEGINS)
    run.kill_everything()
    step = artifact.checkpoint_steps()[-1]
    if artifact.complete:
        raise RuntimeError(
            f"{node.name} had ended before the kill; give it more steps, or checkpoints earlier"
        )
    finish(recipe.start(store))
    plan = recipe.plan(store)
    attempts = [attempt for attempt, _ in planned_part(plan, plan.graph.nodes[node.name]).attempts()]
    assert len({*attempts}) == 2, f"{node.name} has rows of {attempts}, so it did not resume"
    return f"after the checkpoint of step {step:,} of {node.end_step:,} of `{node.name}`"


def bits(plan: Plan, name: str) -> object:
    """The SHA-256 of every file of a part, weights and optimizer states among them, and its metrics; all but
    speeds and times, and the files that state them."""
    files = planned_parts(plan)[name].artifact.manifest.files
    metrics = flatten(planned_parts(plan)[name].results)
    return (
        sorted((file, record.sha256) for file, record in files.items() if Path(file).name not in TIMED),
        {key: value for key, value in metrics.items() if not key.endswith(SPEEDS)},
    )


def rows(plan: Plan) -> Iterator[tuple[str, ...]]:
    """A row of the table for each stage that took time. `plan`: with measured utilisations."""
    parts = planned_parts(plan).values()
    for stage in plan.pipeline.stages:
        own = [part for part in parts if part.stage == stage and part.name not in plan.graph.duplicates]
        seconds = [
            sum(part.seconds.get(kind, 0.0) for part in own) for kind in ("startup", "compute", "storage")
        ]
        trained = plan.estimates.stages.get(stage)
        speed = own[-1].metrics.get("tokens_per_second") if trained and own else None
        mfu = trained.parts[0].mfu if trained else None
        if sum(seconds) >= 0.05:
            yield (
                stage,
                *(f"{each:.1f} s" for each in seconds),
                amount(sum(part.node.tokens for part in own)) if trained else "",
                f"{speed:,.0f}" if speed else "",
                f"{mfu:.1%}" if mfu else "",
            )


def curves(plan: Plan) -> str:
    """The running means of training losses over the tokens of their lineage, as SVG text."""
    every = [curve(plan, stage) for stage in plan.pipeline.stages]
    losses = {each.stage: each.smooth["loss"] for each in every if each and each.kind not in OWN_LOSS}
    looks = Styles(losses, STAGE_COLOURS)
    end = max(series.x[-1] for series in losses.values())
    values = [loss for series in losses.values() for loss in series.y]
    low, high = min(values), max(values)
    right = LEFT + WIDTH + 16
    lines: list[str] = []
    for quarter in range(5):
        x, y = LEFT + WIDTH * quarter / 4, TOP + HEIGHT * quarter / 4
        lines.append(f"<path d='M {LEFT} {y} h {WIDTH}' stroke='{LINE}' stroke-width='0.4'/>")
        lines.append(svg_text(8, y + 4, f"{high - (high - low) * quarter / 4:.2f}"))
        lines.append(svg_text(x - 12, TOP + HEIGHT + 18, amount(end * quarter / 4) if quarter else "0"))
    for index, (stage, series) in enumerate(losses.items()):
        points = " ".join(
            f"{LEFT + WIDTH * tokens / end:.1f},{TOP + HEIGHT * (high - loss) / (high - low):.1f}"
            for tokens, loss in zip(series.x, series.y, strict=True)
        )
        colour, y = looks[stage].colour, TOP + 20 * index
        lines.append(f"<polyline points='{points}' fill='none' stroke='{colour}' stroke-width='1.6'/>")
        lines.append(f"<rect x='{right}' y='{y}' width='11' height='11' fill='{colour}'/>")
        lines.append(svg_text(right + 17, y + 10, stage))
    return as_svg(right + 140, TOP + HEIGHT + 30, lines)


def photograph(report: Path, picture: Path) -> bool:
    """Makes a picture of the report's beginning; False where there is no Chromium, or it fails."""
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        return False
    flags = ["--headless", "--no-sandbox", "--hide-scrollbars", "--window-size=1280,1800"]
    command = [browser, *flags, "--virtual-time-budget=20000", f"--screenshot={picture}", report.as_uri()]
    with contextlib.suppress(subprocess.TimeoutExpired):
        return subprocess.run(command, check=False, capture_output=True, timeout=300).returncode == 0
    return False


def comparison(killed: str, outcome: dict[str, bool]) -> str:
    """What the second run showed. `outcome`: whether a part of both runs has the same bits."""
    other = [f"`{name}`" for name, same in outcome.items() if not same]
    differ = f" Others differ: {', '.join(other)}." if other else ""
    return (
        f" A second run began with the parts before. All its processes were killed {killed}, and the same"
        f" command resumed it. It made {len(outcome)} parts; **{len(outcome) - len(other)} have the bits of"
        f" the first run**.{differ} Compared were all metrics but times, and the SHA-256 of all files but the"
        " model card and tables of metrics, which state times."
    )


def page(plan: Plan, seconds: float, compared: str, images: dict[str, str]) -> str:
    """The page in Markdown. `compared`: by `comparison`; `images`: captions by their links."""
    gpu = f" of {plan.pipeline.cluster.gpu} in bfloat16" if plan.pipeline.cluster else ""
    described = "; ".join(f"{name}: {value}" for name, value in machine().items())
    lines = [
        "# A run on a GPU",
        "",
        f"{stamp()}. Written by `python -m tools.gpu_run`. {described}.",
        "",
        f"`{plan.pipeline.name}` ran from its sources to its end in **{duration(seconds)}**.{compared}",
        "",
        *table(HEADINGS, rows(plan)),
        "",
        "Seconds are sums over the parts of a stage; parts of other stages may have run beside them. A share"
        f" is that of the dense peak{gpu}.",
        *(f"\n![{caption}]({link})" for link, caption in images.items()),
    ]
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str]) -> bool:
    """Whether the killed run has the bits of the other one."""
    parser = argparse.ArgumentParser(prog="python -m tools.gpu_run")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--recipe", default="specs/recipes/gpu.yaml")
    parser.add_argument("--stage", default="sft", help="in which the second run is killed")
    parser.add_argument("--set", action="append", default=[], help="an override of the recipe")
    parser.add_argument("--page", type=Path, default=PAGE)
    asked = parser.parse_args(arguments)
    recipe, folder = Recipe(asked.recipe, asked.set), asked.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    begun = time.monotonic()
    finish(recipe.start(folder / "uninterrupted"))
    seconds = time.monotonic() - begun
    plan = recipe.plan(folder / "uninterrupted")
    if plan.pipeline.cluster is not None:
        plan = recipe.plan(folder / "uninterrupted", "cluster.mfu=measured")
    report, images, name = folder / "report.html", asked.page.parent / "images", asked.page.stem
    report.write_text(render(plan))
    images.mkdir(exist_ok=True)
    (images / f"{name}.svg").write_text(curves(plan))
    captions = {f"images/{name}.svg": "Training loss, in nats per token, over tokens"}
    if photograph(report, images / f"{name}.png"):
        captions[f"images/{name}.png"] = "The report of the run"
    asked.page.write_text(page(plan, seconds, " The second run has not ended.", captions))
    again = dependent(plan, asked.stage)
    share(plan, folder / "killed", asked.stage)
    killed = kill_and_resume(recipe, folder / "killed", asked.stage)
    resumed = recipe.plan(folder / "killed")
    outcome = {part: bits(plan, part) == bits(resumed, part) for part in again}
    asked.page.write_text(page(plan, seconds, comparison(killed, outcome), captions))
    return all(outcome.values())


if __name__ == "__main__":
    sys.exit(not main(sys.argv[1:]))
