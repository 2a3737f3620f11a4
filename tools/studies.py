"""Writes docs/studies.md: the claims of papers that the miniature studies state, beside their stored results.

    for recipe in specs/recipes/*-mini.yaml; do apertus run $recipe --store results; done
    python -m tools.studies results             # several stores, of several machines, are compared

Invariant: the page is made from stored results alone, and says which are missing.
"""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from flows.format import duration
from flows.planning.plan import make
from flows.report.claims import Tested, claims_of
from flows.report.content import collect
from flows.report.experiments import Measured
from infra.store import Store
from specs.errors import counted
from specs.recipe import load

ROOT = Path(__file__).parents[1]
PAGE, IMAGES = ROOT / "docs" / "studies.md", "images/studies"
LABEL, HALF, NUMBER, STEP, TOP = 350, 130, 240, 42, 58  # pixels
COLOURS = {"shown": "#2e7d4f", "the opposite": "#b3402e", "a difference": "#b3402e"}
HEAD = """\
# The studies

Each row is a claim, of a paper or of a control, tested by a recipe that two cores run in minutes.
`python -m tools.studies` writes this page from stored results; `make test-all` runs the studies again and
compares the verdicts.

A number is a difference (for a correlation, r) in the unit of the recipe's figure, which may not be the
paper's: its mean over seeds, with the 95% interval (Student's t; Fisher's for a correlation). The time is
the sum over a study's parts on the first machine, whatever else it did, divided by how many run at once.

- *Shown*: the interval lies on the side of 0 that the claim states.
- *The opposite*: the interval lies on the other side of 0.
- *Not shown*: the interval contains 0. *Cannot be shown at this size*: it does, and the recipe says why.
- *No difference seen*, *a difference*: the same where the claim is that there is none.
- *Unstable*: another machine, with other installed text, gives another verdict.
- *Not measured*: there is no stored result.

Of {claims} at this level, some are shown by chance. A miniature has 0.1 to 0.7M parameters: what it does
not show may be true of a model.
"""


class Study(NamedTuple):
    name: str
    description: str
    parts: int
    seconds: float  # of all parts, as many at once as the recipe says
    claims: list[Tested]


class _Row(NamedTuple):
    """A claim in the picture. Positions are along the half axis, positive where the paper's number is."""

    text: str
    verdict: str
    lines: list[str]
    number: str
    colour: str
    at: float | None
    low: float | None
    high: float | None


def study(recipe: Path, store: Store) -> Study | None:
    """What a recipe shows by the results in a store; None if it states no claim."""
    pipeline = load(recipe)
    if not any(figure.claims for figure in pipeline.figures.values()):
        return None
    run = collect(make(pipeline, store))
    claims = [claim for experiment in run.experiments.values() for claim in claims_of(experiment)]
    seconds = sum(run.seconds.values()) / pipeline.concurrency
    return Study(pipeline.name, pipeline.description, len(run.parts), seconds, claims)


def verdict(claims: list[Tested]) -> str:
    """The verdict of a claim on several machines."""
    measured = [claim for claim in claims if claim.number is not None] or claims[:1]
    verdicts = dict.fromkeys(claim.verdict for claim in measured)
    return f"unstable: {', '.join(verdicts)}" if len(verdicts) > 1 else measured[0].reasoned


def page(studies: list[list[Study]]) -> str:
    """The page. `studies`: by machine, the same in the same order."""
    every = (claims for machines in zip(*studies, strict=True) for claims in _claims(machines))
    measured = sum(any(claim.number is not None for claim in claims) for claims in every)
    return "\n".join([HEAD.format(claims=counted(measured, "measured claim")), *_sections(studies)])


def _claims(machines: Sequence[Study]) -> Iterator[tuple[Tested, ...]]:
    """Each claim of a study on all machines."""
    return zip(*(machine.claims for machine in machines), strict=True)


def _sections(studies: list[list[Study]]) -> Iterator[str]:
    for machines in zip(*studies, strict=True):
        first = machines[0]
        yield f"## {first.description}\n"
        recipe = f"[`{first.name}`](../specs/recipes/{first.name}.yaml)"
        yield f"{recipe}, {first.parts} parts, {duration(first.seconds)}\n"
        yield f"![The claims, each with its interval]({IMAGES}/{first.name}.svg)\n"
        yield "| claim | paper | here | verdict |\n|---|---|---|---|"
        for claims in _claims(machines):
            here = "<br>".join(claim.shown for claim in claims)
            yield f"| {claims[0].text} | {claims[0].claim.paper} | {here} | {verdict(list(claims))} |"
        yield ""


def picture(of: Study) -> str:
    """The claims of a study as an SVG file: each number over 0, in a scale of its own."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=StrictUndefined,
        trim_blocks=True, keep_trailing_newline=True,
    )  # fmt: skip
    return environment.get_template("studies.svg.jinja").render(
        width=LABEL + 2 * HALF + NUMBER, height=TOP + STEP * len(of.claims), top=TOP, step=STEP,
        middle=LABEL + HALF, half=HALF, rows=[_row(claim) for claim in of.claims],
    )  # fmt: skip


def _row(claim: Tested) -> _Row:
    number = claim.number or Measured(0.0)
    ends = [end for end in number if end is not None]
    scale = (-1 if claim.claim.expected == "below" else 1) / (1.05 * max(map(abs, ends)) or 1)
    at, low, high = (None if end is None else round(end * scale, 3) for end in number)
    return _Row(
        claim.text,
        claim.verdict,
        textwrap.wrap(claim.text, 52, max_lines=2, placeholder=" …"),
        claim.shown.rpartition(", ")[0],
        COLOURS.get(claim.verdict, "#7b8794"),
        at if claim.number else None,
        low,
        high,
    )


def main(stores: list[str]) -> None:
    if not stores:
        raise SystemExit(__doc__)
    recipes = sorted((ROOT / "specs" / "recipes").glob("*-mini.yaml"))
    studies = []
    for url in stores:
        store = Store.open(url)
        studies.append([one for recipe in recipes if (one := study(recipe, store)) is not None])
    for one in studies[0]:
        target = PAGE.parent / IMAGES / f"{one.name}.svg"
        target.parent.mkdir(exist_ok=True)
        target.write_text(picture(one))
    PAGE.write_text(page(studies))


if __name__ == "__main__":
    main(sys.argv[1:])
