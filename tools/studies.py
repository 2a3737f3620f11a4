"""Writes docs/studies.md: the claims of papers that the miniature studies state, beside the results of every
machine that ran them, which docs/studies.jsonl holds, a line for each.

    for recipe in specs/recipes/*-mini.yaml; do apertus run $recipe --store results; done
    python -m tools.studies "a laptop=results"      # or nothing, for a page of what is recorded

Invariant: a result is recorded once its study is complete, in place of an earlier one of the same machine. It
is dropped, with a message, when a part of the study or a figure with claims is another one.
"""

from __future__ import annotations

import hashlib
import json
import sys
import textwrap
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from pydantic import BaseModel

from flows.format import duration
from flows.planning.plan import make
from flows.report.claims import Tested, claims_of
from flows.report.content import collect
from flows.report.experiments import Measurement
from flows.report.ranks import Rank, ranks
from infra.store import Store, runs
from specs.errors import counted
from specs.pipeline import Pipeline
from specs.recipe import load
from tools.fingerprints import pinned
from tools.record import table

ROOT = Path(__file__).parents[1]
RECIPES = sorted((ROOT / "specs" / "recipes").glob("*-mini.yaml"))
DOCS = ROOT / "docs"
PAGE, RECORD, IMAGES = DOCS / "studies.md", DOCS / "studies.jsonl", "images/studies"
LABEL, HALF, NUMBER, STEP, TOP = 350, 130, 240, 42, 58  # pixels
APART = 14  # pixels between the numbers of two machines
COLOURS = {"shown": "#2e7d4f", "the opposite": "#b3402e", "a difference": "#b3402e"}
HEAD = """\
# The studies

Each row is a claim, of a paper or of a control, tested by a recipe that two cores run in minutes.
`python -m tools.studies` writes this page from recorded results; `make test-all` runs the studies again and
compares the verdicts.

A number is a difference (for a correlation, r) in the unit of the recipe's figure, which may not be the
paper's: its mean over seeds, with the 95% interval (Student's t; Fisher's for a correlation), one for each
machine that has it; those of machine A were rounded. The time is that of a study's run on two cores of the
machine that needed least.

- *Shown*: the interval lies on the side of 0 that the claim states.
- *The opposite*: the interval lies on the other side of 0.
- *Not shown*: the interval contains 0. *Cannot be shown at this size*: it does, and the recipe says why.
- *No difference seen*, *a difference*: the same where the claim is that there is none.
- *Unstable*: another machine gives another verdict.
- *Not measured*: no result is recorded.

Of {claims} at this level, some are shown by chance. A miniature has 0.1 to 0.7M parameters: what it does
not show may be true of a model.
"""


class Number(NamedTuple):
    """What a machine measured for a claim."""

    number: Measurement | None
    seeds: int
    left_out: int


class Result(BaseModel):
    """What a machine measured in a study."""

    study: str
    identity: str
    machine: str
    date: str
    python: str
    parts: int
    seconds: float | None  # of its runs; None if it is not known, or other work ran beside them
    claims: dict[str, Number]  # by figure and claim
    ranks: dict[str, list[Rank]] = {}  # by figure, where it has them


class Study(NamedTuple):
    """A recipe with claims, and its results, the first machine's first."""

    pipeline: Pipeline
    identity: str
    results: list[Result]

    def claims(self) -> Iterator[list[Tested]]:
        """Each claim on every machine that has a number; one without a number if none has."""
        for name, figure in self.pipeline.figures.items():
            for text, claim in figure.claims.items():
                numbers = [result.claims[f"{name}: {text}"] for result in self.results]
                measured = [Tested(text, claim, *number) for number in numbers if number.number is not None]
                yield measured or [Tested(text, claim, None, 0)]


class _Mark(NamedTuple):
    """A number in the picture. Positions are along the half axis, positive where the paper's number is."""

    at: float
    low: float | None
    high: float | None
    number: str
    colour: str
    down: float  # pixels


class _Row(NamedTuple):
    """A claim in the picture."""

    text: str
    verdict: str
    lines: list[str]
    marks: list[_Mark]


def measured(study: Study, machine: str, store: Store) -> Result | None:
    """The result of a study in the store of a machine; None if the study is not complete there."""
    name, plan = study.pipeline.name, make(study.pipeline, store)
    run, places = collect(plan), {(node.path, node.end_step) for node in plan.graph.nodes.values()}
    if any(experiment.missing for experiment in run.experiments.values()):
        return None
    records = [runs.read(store, name, stamp) for stamp in runs.stamps(store, name)]
    # a run of another version of the recipe has other places; a selection changes some of them within a run
    own = [record for record in records if 2 * len(places & {*record.parts.values()}) > len(places)]
    ends = [record.end for record in own if record.end is not None]
    return Result(
        study=name,
        identity=study.identity,
        machine=machine,
        date=ends[-1].started[:10] if ends else "",
        python=", ".join(run.versions.get("python", [])),
        parts=len(run.parts),
        seconds=round(sum(end.seconds for end in ends), 1) or None,
        claims={
            f"{figure}: {claim.text}": Number(claim.number, claim.seeds, claim.left_out)
            for figure, experiment in run.experiments.items()
            for claim in claims_of(experiment)
        },
        ranks={name: ranks(drawn) for name, drawn in run.experiments.items() if drawn.spec.ranks},
    )


def identity(pipeline: Pipeline) -> str:
    """What the numbers of a study depend on, whatever the machine: its parts, and its figures without their
    prose and without `ranks`, of which a record may have none."""
    prose: dict[str, Any] = {"title": True, "text": True, "ranks": True, "x": {"label"}, "y": {"label"}}
    prose["claims"] = {"__all__": {"paper", "cannot"}}
    figures = [
        figure.model_dump(exclude=prose, exclude_defaults=True)
        for figure in pipeline.figures.values()
        if figure.claims or figure.ranks
    ]
    return hashlib.sha256(json.dumps([pinned(pipeline), figures]).encode()).hexdigest()[:32]


def verdict(claims: Sequence[Tested]) -> str:
    """The verdict of a claim on several machines."""
    verdicts = dict.fromkeys(claim.verdict for claim in claims)
    return f"unstable: {', '.join(verdicts)}" if len(verdicts) > 1 else claims[0].reasoned


def page(studies: Sequence[Study]) -> str:
    count = sum(claims[0].number is not None for study in studies for claims in study.claims())
    head = HEAD.format(claims=counted(count, "measured claim"))
    return "\n".join([head, *_sections(studies)])


def _sections(studies: Sequence[Study]) -> Iterator[str]:
    for study in studies:
        pipeline, _, results = study
        yield f"## {pipeline.description}\n"
        about = [f"[`{pipeline.name}`](../specs/recipes/{pipeline.name}.yaml)"]
        if results:
            about += [f"{results[0].parts} parts", counted(len(results), "machine")]
        if times := [result.seconds for result in results if result.seconds is not None]:
            about.append(duration(min(times)))
        yield f"{', '.join(about)}\n"
        yield f"![The claims, each with its interval]({IMAGES}/{pipeline.name}.svg)\n"
        cells = (
            (
                claims[0].text,
                claims[0].claim.paper,
                "<br>".join(claim.shown for claim in claims),
                verdict(claims),
            )
            for claims in study.claims()
        )
        yield from table(("claim", "paper", "here", "verdict"), cells)
        yield ""
        for result in results:
            for name, ranked in result.ranks.items():
                yield f"{pipeline.figures[name].title}, on machine {result.machine}:\n"
                compared = ((rank.series, rank.shown, ", ".join(rank.alike) or "none") for rank in ranked)
                yield from table(("series", "rank (those left open)", "not told apart from"), compared)
                yield ""


def picture(study: Study) -> str:
    """The claims of a study as an SVG file: each with its numbers by machine, in a scale of its own."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=StrictUndefined,
        trim_blocks=True, keep_trailing_newline=True,
    )  # fmt: skip
    rows = [_row(claims) for claims in study.claims()]
    step = max(STEP, APART * (len(study.results) + 1))
    return environment.get_template("studies.svg.jinja").render(
        width=LABEL + 2 * HALF + NUMBER, height=TOP + step * len(rows), top=TOP, step=step,
        middle=LABEL + HALF, half=HALF, rows=rows,
    )  # fmt: skip


def _row(claims: Sequence[Tested]) -> _Row:
    ends = [abs(end) for claim in claims for end in claim.number or () if end is not None]
    scale = (-1 if claims[0].claim.expected == "below" else 1) / (1.05 * max(ends, default=0) or 1)
    text, marks = claims[0].text, []
    for index, claim in enumerate(claims):
        if claim.number is not None:
            at, low, high = (None if end is None else round(end * scale, 3) for end in claim.number)
            colour, down = COLOURS.get(claim.verdict, "#7b8794"), APART * (index - (len(claims) - 1) / 2)
            marks.append(_Mark(at or 0.0, low, high, claim.shown.rpartition(", ")[0], colour, down))
    return _Row(text, verdict(claims), textwrap.wrap(text, 52, max_lines=2, placeholder=" …"), marks)


def recorded() -> Iterator[Study]:
    """The recipes that state claims, with what is recorded of them as they are now."""
    record = [Result.model_validate_json(line) for line in RECORD.read_text().splitlines()]
    for recipe in RECIPES:
        pipeline = load(recipe)
        if any(figure.claims for figure in pipeline.figures.values()):
            own = identity(pipeline)
            of_study = [result for result in record if result.study == pipeline.name]
            for result in of_study:
                if result.identity != own:
                    print(f"dropped: {result.study} of {result.machine}, of other parts", file=sys.stderr)
            yield Study(pipeline, own, [result for result in of_study if result.identity == own])


def main(stores: Sequence[str]) -> None:
    studies = list(recorded())
    for study, (machine, _, url) in product(studies, [named.partition("=") for named in stores]):
        result = measured(study, machine, Store.open(url))
        if result is None:
            print(f"{url} has no complete {study.pipeline.name}", file=sys.stderr)
            continue
        others = [known for known in study.results if known.machine != machine]
        study.results[:] = [*others, result]
    record = [result.model_dump_json(exclude_defaults=True) for study in studies for result in study.results]
    RECORD.write_text("\n".join(record) + "\n")
    for study in studies:
        (DOCS / IMAGES / f"{study.pipeline.name}.svg").write_text(picture(study))
    PAGE.write_text(page(studies))


if __name__ == "__main__":
    main(sys.argv[1:])
