"""The `mixture` stage: an immutable sampling recipe over corpora.

Invariant: shares are exact. A weight is the decimal number that is written (0.7 is 7/10, not its nearest
float), and nothing is computed from it in floating point.
"""

from collections.abc import Iterator, Sequence
from fractions import Fraction
from math import gcd, lcm
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator

from specs.base import Spec, identity, option, reference
from specs.errors import FieldPath, Problem
from specs.stages.base import Part, Stage, Weight, WeightField
from specs.units import Budget, Reference, ReferenceText

Weights = dict[ReferenceText, WeightField]
DRAWN_FROM = ("corpus", "mixture")


def _factors(value: Any) -> Any:
    """Turns a list into a map to factors of 1."""
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        twice = sorted({item for item in value if value.count(item) > 1})
        if twice:
            raise ValueError(
                f"{', '.join(twice)} is repeated; name it once, with a factor: {{{twice[0]}: 2}}"
            )
        return dict.fromkeys(value, 1)
    return value


class Anneal(Spec):
    """Shares that change linearly from the mixture's weights to others during training, in `pieces` equal
    steps, each with the shares of its middle; training after that has the final shares."""

    to: Weights = reference(
        min_length=1,
        to=DRAWN_FROM,
        description="weights at the end; a source that only one of the two names has share 0 in the other",
    )
    over: Budget = reference(description="length of the change, from the start of training on the mixture")
    pieces: int = reference(8, ge=1, le=256)


def _domain(value: Any) -> Any:
    return {"as": value} if isinstance(value, str) else value


class Domain(Spec):
    """A source that is drawn with the learned weight of another."""

    as_: Reference = reference(alias="as", to="corpus", description="the source that has the weight")


class Learned(Spec):
    """Weights that a `domain_weights` stage has learned, in millionths. Until that stage has finished, plans
    take the weights as equal."""

    from_: Reference = reference(alias="from", to="domain_weights")
    sources: (
        dict[ReferenceText, Annotated[Domain, BeforeValidator(_domain, json_schema_input_type=str | Domain)]]
        | None
    ) = reference(
        None,
        min_length=1,
        to="corpus",
        description="the sources, each with the one whose weight it gets: {corpus/web: sample/web}. By"
        " default the sources that have a weight",
    )


class MixtureStage(Stage):
    """Draws training samples from corpora or other mixtures, by `weights`, `proportional` to the size of
    corpora, or by weights that were `learned`."""

    VERSION: ClassVar[int] = 2
    kind: Literal["mixture"] = identity()
    weights: Weights | None = reference(
        None,
        min_length=1,
        to=DRAWN_FROM,
        description="share of samples of each part of a corpus (`corpus/code`) or mixture, relative to the"
        " others'",
    )
    proportional: Annotated[
        Weights | None, BeforeValidator(_factors, json_schema_input_type=list[str] | Weights)
    ] = reference(
        None,
        min_length=1,
        to="corpus",
        description="in place of weights: parts of corpora to be drawn in proportion to their size in"
        " tokens, or a map to factors on it: {corpus/web: 1, corpus/code: 2}. All sources with factor 1 are"
        " repeated equally often",
    )
    learned: Learned | None = reference(None, description="in place of weights: the stage that learned them")
    anneal: Anneal | None = reference(None)
    exclude: list[ReferenceText] = reference(
        default_factory=list,
        description="training stages: samples that they have consumed, up to the checkpoint that training"
        " continues from, are drawn again only after the rest of their source; needs the same seed, sequence"
        " length and packing",
    )
    max_repetition: float = reference(
        4.0,
        gt=0,
        description="allowed passes over a source; a weight may state another",
    )
    seed: int = identity(28)

    def conflicts(self) -> Iterator[str]:
        if [self.weights, self.proportional, self.learned].count(None) != 2:
            yield (
                "a mixture has either weights: {corpus/code: 70, corpus/web: 30} or proportional:"
                " [corpus/code, corpus/web] or learned: {from: <a domain_weights stage>}"
            )
        if self.anneal is not None and self.weights is None:
            field = "proportional" if self.learned is None else "learned"
            yield f"anneal goes from weights to weights; set weights in place of {field}"
        if selected := [name for name in self.exclude if "@" in name or "/" in name]:
            yield (
                f"exclude names stages as a whole; write '{selected[0].split('@')[0].split('/')[0]}', not"
                f" '{selected[0]}'"
            )

    @property
    def annealed(self) -> bool:
        return self.anneal is not None

    @property
    def excluded_stages(self) -> list[str]:
        return self.exclude

    def part_problems(self, at: FieldPath, part: Reference, of: Stage) -> Iterator[Problem]:
        if of.annealed:
            message = f"mixture '{part.stage}' is annealed: its shares change during training"
            yield Problem(at, message, "name a constant mixture.")

    @property
    def sources(self) -> dict[str, Weight]:
        """The sources under `weights` or `proportional`."""
        return self.weights or self.proportional or {}

    @property
    def pieces(self) -> list[dict[str, Fraction]]:
        """The shares, or factors, of each mixture that the stage resolves into: one, or the pieces of
        `anneal` and its end."""
        begin = {name: exact(weight.weight) for name, weight in self.sources.items()}
        if self.anneal is None:
            return [begin]
        end = {name: exact(weight.weight) for name, weight in self.anneal.to.items()}
        middles = [Fraction(2 * piece + 1, 2 * self.anneal.pieces) for piece in range(self.anneal.pieces)]
        return [between(begin, end, middle) for middle in [*middles, Fraction(1)]]


class MixturePart(Part):
    """The resolved mixture. Inputs: `source:<i>`, corpora and mixtures, in the order of their fingerprints,
    so that names do not matter; `learned`, a segment of a `domain_weights` stage. Allowed repetition and
    exclusions concern planning and training, and are not fields here."""

    weights: list[int] = identity(description="weights in the order of the sources")
    learned: list[int] = option(
        default_factory=list, description="for each source: the position of its weight among the learned ones"
    )
    proportional: bool = option(False, description="weights are factors of the sources' sizes")
    seed: int = identity()


def exact(weight: float) -> Fraction:
    """The number as it is written in decimal: 0.7 -> 7/10."""
    return Fraction(repr(weight))


def integers(weights: Sequence[Fraction | int]) -> list[int]:
    """The smallest integers in the same ratio: [7/10, 1/5, 1/10] -> [7, 2, 1]."""
    fractions = [Fraction(weight) for weight in weights]
    scale = lcm(*(weight.denominator for weight in fractions))
    whole = [int(weight * scale) for weight in fractions]
    divisor = gcd(*whole)
    return [weight // divisor for weight in whole]


def between(begin: dict[str, Fraction], end: dict[str, Fraction], part: Fraction) -> dict[str, Fraction]:
    """Shares interpolated from `begin` to `end` at `part`, from 0 to 1; shares of 0 are left out."""
    shares: dict[str, Fraction] = {}
    for weights, factor in ((begin, 1 - part), (end, part)):
        for name, weight in weights.items():
            shares[name] = shares.get(name, Fraction(0)) + factor * weight / sum(weights.values())
    return {name: share for name, share in shares.items() if share}
