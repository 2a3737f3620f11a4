"""Tabulates the plans of all recipes, and compares the published Apertus runs with their plans line by line.

    python -m tools.published         # writes its tables into docs/recipes.md, between the marks there

Invariant: planned numbers come from a plan of the checked-in recipe, published numbers are here with their
sources; neither is adjusted to the other, and each line says how its number is counted. Sources are named as
in `specs/recipes/shared/apertus.yaml`.
"""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from flows.format import amount, duration, energy, flop
from flows.format import size as in_bytes
from flows.inspection.goldfish import masked_share
from flows.planning.plan import Plan, make
from infra.store import Store
from specs.recipe import load
from specs.trajectory import Trajectory

RECIPES = Path(__file__).parents[1] / "specs" / "recipes"
SIZES = ("8b", "70b")
# Report, table H.8: first iteration of each data stage; tokens before it, in billions. The end is the last
# iteration.
BORDERS = {
    "8b": {"stage-3": (1_678_000, 7038), "stage-4": (2_269_525, 12_000), "stage-5": (2_429_920, 13_345)},
    "70b": {
        "stage-2": (569_655, 5165),
        "stage-3": (789_001, 8845),
        "stage-4": (989_501, 12_209),
        "stage-5": (1_062_328, 13_431),
    },
}
END = {"8b": 2_627_139, "70b": 1_155_828}
DOUBLING = {"8b": 1_718_272_000, "70b": 1_072_164_864}  # first sample of the doubled batch [8B], [70B]
FLOPS = {"8b": "7.74e23 [D]", "70b": "6.74e24 [P] E"}
PARAMETERS = {"8b": "8B", "70b": "70B"}
LONG_TOKENS = {"8b": (78.43, 58.13, 58.72, 29.19), "70b": (78.52, 58.22, 58.72, 29.23)}  # billions, [LC], [D]
LENGTHS = ("8k", "16k", "32k", "64k")
SPEED = {"8b": 6960, "70b": 723}  # tokens a second and GPU in pretraining [P]
LONG_SPEED = {"8b": (6150, 4300, 3700, 1800), "70b": (780, 710, 480, 160)}  # in long context, [P] table 5
PAGE = RECIPES.parents[1] / "docs" / "recipes.md"
OVERVIEW = (
    "apertus-8b",
    "apertus-70b",
    "apertus-1.5b-100b",
    "continue-pretrain",
    "wso",
    "wso-8b",
    "optimizer-consistency",
    "goldfish",
    "optimizer-benchmark",
    "optimizer-benchmark-210m",
    *("optimizer-benchmark-583m", "optimizer-benchmark-720m", "optimizer-benchmark-budgets"),
    *("optimizer-benchmark-budgets-batch-32", "optimizer-benchmark-budgets-batch-512"),
    *("optimizer-benchmark-budgets-210m", "optimizer-benchmark-budgets-720m"),
    "ademamix-forgetting",
    "tokenizer-study",
    *("gpu", "mini", "smoke", "smoke-chat", "wso-mini", "optimizer-consistency-mini", "goldfish-mini"),
    *(
        "optimizer-benchmark-mini",
        "ademamix-forgetting-mini",
        "ladder-mini",
        "depth-average-mini",
        "continue-pretrain-mini",
    ),
    *("layer-pairs-mini", "repeats-mini", "sparse-attention-mini", "distill-mini", "domain-weights-mini"),
    *("mamba-mini", "mamba-time-mini", "tokenizer-study-mini"),
    *("rounds-mini", "rote-memorisation-mini"),
)


@dataclass(frozen=True)
class Line:
    """A quantity as published, with its source, and as planned, and how it is counted."""

    quantity: str
    published: str
    planned: str
    counted: str = ""


@functools.cache
def plan_of(name: str, *assignments: str) -> Plan:
    """The plan of the recipe in the file of that name, without data and with an empty store. `assignments`:
    as for `--set`."""
    with tempfile.TemporaryDirectory() as folder:
        return make(load(RECIPES / f"{name}.yaml", assignments), Store.open(folder), ask_network=False)


def lines(size: str, plan: Plan) -> Iterator[Line]:
    """The published numbers of a model size that its plan has too."""
    run = plan.graph.trajectories["pretrain"]
    totals = [step.node for step in plan.steps.values() if step.node.stage == "pretrain"]
    tokens, flops = sum(node.tokens for node in totals), sum(node.flops for node in totals)
    yield Line(
        "parameters",
        f"{PARAMETERS[size]} [P]",
        f"{run.model.parameters:,}",
        "all of them",
    )
    yield Line(
        "tokens of pretraining",
        "15T [P]",
        f"{tokens:,}",
        "whole steps of 3,662,109,375 samples",
    )
    yield Line("last iteration", f"{END[size]:,} [P] H.8", f"{run.steps:,}", "floor")
    yield Line(
        "batch doubles, at sample",
        f"{DOUBLING[size]:,} [{size.upper()}]",
        f"{doubling(run)[0]:,}",
        f"whole steps: {doubling(run)[1]:,}",
    )
    for stage, (iteration, billions) in BORDERS[size].items():
        done = border(run, stage)
        if done == iteration:
            counted = "steps before it, where the batch doubles; the first iteration is one more"
        else:
            counted = "from 1"
        planned = done if done == iteration else done + 1
        yield Line(f"{stage} begins, iteration", f"{iteration:,} [P] H.8", f"{planned:,}", counted)
        yield Line(
            f"{stage} begins, tokens",
            f"{billions:,}B [P] H.8",
            f"{run.tokens_at(done) / 1e9:,.3f}B",
            "floor of billions",
        )
    exact = run.segments[-1].schedule.decay_start
    yield Line(
        "decay begins, sample",
        "3,258,203,569 [8B], [70B], [D]",
        f"{exact // run.settings.sequence_length:,}",
        "total less 403,905,806; exact",
    )
    yield Line(
        "decay begins, tokens",
        "13.346T [D]; 13.5T [P]",
        f"{exact / 1e12:.3f}T",
        "scripts against text",
    )
    yield Line(
        "FLOPs of pretraining",
        FLOPS[size],
        f"{flops:.4g}",
        "counted as in [P] E",
    )
    yield from spent(size, plan)
    goldfish = run.settings.goldfish
    assert goldfish is not None
    rate = masked_share(goldfish, run.settings.sequence_length, run.model.vocab_size)
    yield Line(
        "left out by Goldfish, nominal",
        "0.3T [P]",
        f"{tokens / goldfish.k / 1e12:.3f}T",
        f"1/{goldfish.k} of all labels",
    )
    yield Line(
        "left out by Goldfish, by its hash",
        "about 1.8% [D]",
        f"{rate * tokens / 1e12:.3f}T, {rate:.2%}",
        "uniform ids; see below",
    )
    for length, published, speed in zip(LENGTHS, LONG_TOKENS[size], LONG_SPEED[size], strict=True):
        phase = plan.graph.trajectories[f"long-context-{length}/1"]
        cost = plan.estimates.stages[f"long-context-{length}"]
        yield Line(
            f"long context {length}, tokens",
            f"{published}B [LC]",
            f"{phase.tokens / 1e9:.2f}B",
            f"{phase.steps:,} steps",
        )
        yield Line(
            f"long context {length}, GPU-hours",
            f"{published * 1e9 / speed / 3600:,.0f} [LC], [P], [D]",
            f"{cost.spent.gpu_hours or 0:,.0f}",
            f"{speed:,} tokens/s and GPU; {cost.parts[0].gpus:,} GPUs, {duration(cost.spent.seconds)}",
        )
    yield Line(
        "final learning rate",
        {"8b": "1.1e-5", "70b": "1e-6"}[size] + " [P]",
        f"{run.lr_at(run.steps):.3g}",
        "of the step that would follow",
    )


def spent(size: str, plan: Plan) -> Iterator[Line]:
    """The lines about time, energy and memory of a run. The recipe's MFU follows from the published
    speed, so GPU-hours agree if FLOPs and tokens do."""
    stage, whole, cluster = plan.estimates.stages["pretrain"], plan.estimates.totals(), plan.pipeline.cluster
    assert cluster is not None
    hours, tokens, asked = stage.spent.gpu_hours or 0, 15e12, whole["inference"]
    yield Line(
        "GPU-hours of pretraining",
        f"{tokens / SPEED[size] / 3600:,.0f} [D]",
        f"{hours:,.0f}",
        f"{SPEED[size]:,} tokens a second and GPU [P], MFU {stage.parts[0].mfu:.1%}",
    )
    report = size == "70b"
    yield Line(
        "GPU-hours in all",
        "about 6M [P]" if report else "not published",
        f"{amount(whole['gpu_hours'])}",
        f"{amount(asked['gpu_hours'])} not training; without {len(whole['not_counted'])} parts",
    )
    sampled = [
        part for part in plan.estimates.asking if part.node.kind == "completions" and part.work.requests
    ]
    seconds = [part.spent.seconds or 0 for part in sampled]
    yield Line(
        "completions",
        "10 for each of 453,235 prompts [P]",
        f"{sum(part.work.requests for part in sampled):,.0f}",
        f"of training, both sets; {amount(sum(part.work.sampled_tokens for part in sampled))} tokens,"
        f" {duration(sum(seconds))} on {sampled[0].gpus} GPU{'s' * (sampled[0].gpus > 1)}",
    )
    yield Line(
        "wall-clock of pretraining",
        "about 90 days [P]" if report else "not published",
        duration(stage.spent.seconds),
        f"{stage.parts[0].gpus:,} GPUs; the run began with half",
    )
    yield Line(
        "energy in all",
        "about 5 GWh [P]" if report else "not published",
        energy(whole["energy_kwh"]),
        f"{cluster.watts:g} W a GPU [P]" + ("; see below" if report else ""),
    )
    most = max(plan.estimates.stages.values(), key=lambda stage: stage.largest.memory.total)
    yield Line(
        "memory of a GPU",
        f"at most {cluster.device.memory / 1e9:.0f} GB: {cluster.gpu} [P]",
        in_bytes(most.largest.memory.total),
        f"of {most.parts[0].node.stage}",
    )


def border(run: Trajectory, stage: str) -> int:
    """The number of steps before the first that draws from the mixture of a data stage."""
    return next(segment.start_step for segment in run.segments if segment.mixture == stage)


def doubling(run: Trajectory) -> tuple[int, int]:
    """The numbers of samples and of steps before the first step with a larger batch."""
    segment = next(segment for segment in run.segments if segment.batch > run.segments[0].batch)
    return segment.start_sample, segment.start_step


def markdown() -> str:
    """The tables of all published sizes, in Markdown."""
    tables_of_sizes = []
    for size in SIZES:
        rows = [
            f"| {line.quantity} | {line.published} | {line.planned} | {line.counted} |"
            for line in lines(size, plan_of(f"apertus-{size}"))
        ]
        heading = [
            f"### Apertus {size.upper()}",
            "",
            "| | published | planned | counted |",
            "|---|---|---|---|",
        ]
        tables_of_sizes.append("\n".join([*heading, *rows, ""]))
    return "\n".join(tables_of_sizes)


def overview() -> str:
    """A table with a line for each recipe: the largest model of its plan, and sums over all stages."""
    rows = [
        "| recipe | | parameters | tokens | sampled | FLOPs | GPU-hours | memory of a GPU |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name in OVERVIEW:
        plan = plan_of(name)
        totals, cluster = plan.estimates.totals(), plan.pipeline.cluster
        hours, asked = "-", totals["inference"]["gpu_hours"] or 0
        if cluster and totals["gpu_hours"]:
            without = "*" * bool(totals["not_counted"])
            hours = f"{amount(totals['gpu_hours'])} {cluster.gpu} ({amount(asked)}{without})"
        numbers = [
            amount(totals["parameters"]),
            amount(totals["tokens"]),
            amount(totals["sampled_tokens"]),
            flop(totals["flops"]),
            hours,
            in_bytes(totals["memory_bytes"]) if totals["memory_bytes"] else "-",
        ]
        rows.append(
            f"| [`{name}`](../specs/recipes/{name}.yaml) | {plan.pipeline.description} |"
            f" {' | '.join(numbers)} |"
        )
    return "\n".join([*rows, ""])


def placed(text: str, mark: str, table: str) -> str:
    """The page `text` with `table` between the two marks."""
    begin, end = f"<!-- {mark} -->\n", f"<!-- end of {mark} -->\n"
    before, rest = text.split(begin)
    return f"{before}{begin}{table}{end}{rest.split(end)[1]}"


def main() -> None:
    """Writes the tables into the page."""
    text = placed(PAGE.read_text(), "overview", overview())
    PAGE.write_text(placed(text, "published", markdown()))


if __name__ == "__main__":
    main()
