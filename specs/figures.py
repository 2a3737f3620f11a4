"""Figures that a recipe declares: metrics of stages on axes. The report draws them.

Invariant: a figure reads stored results and enters no fingerprint.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator

from specs.base import Spec, execution
from specs.errors import Problem, did_you_mean

VARIANT = "{variant}"


class Axis(Spec):
    """One axis. `<metric>/low` and `<metric>/high` are drawn as the metric's interval where they exist."""

    stage: str = execution(
        "",
        description="the stage of every variant, with `{variant}` in place of its name: sft-{variant}",
    )
    metric: str | list[str] = execution(
        "",
        description="a number of the stage's manifest, or val_loss; of a list, the mean. A `*` in the metric"
        " of y matches numbers, which are then the positions on x:"
        " memorisation/greedy/prefix-50/offset-0/rouge_l/*",
    )
    label: str = execution("")
    scale: Literal["linear", "log"] = execution("linear")
    better: Literal["lower", "higher"] | None = execution(
        None,
        description="the better direction, shown beside the axis; needed for `front`",
    )

    def conflicts(self) -> Iterator[str]:
        if bool(self.stage) != bool(self.metric):
            yield "an axis needs both stage and metric, or neither"
        if isinstance(self.metric, list) and ("*" in "".join(self.metric) or not self.label):
            yield "an axis with the mean of several metrics needs a label, and may not have a *"
        if self.stage.count(VARIANT) != 1 and self.stage:
            yield f"'{self.stage}' names no variant; write {VARIANT} once, in place of the variant's name"


def _variants(value: Any) -> Any:
    if isinstance(value, str):
        return {value: ""}
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        return dict.fromkeys(value, "")
    return value


Variants = Annotated[
    dict[str, str], BeforeValidator(_variants, json_schema_input_type=str | list[str] | dict[str, str])
]


class Claim(Spec):
    """What a paper says of a figure, as a number that is below or above 0: a difference between two series,
    or a correlation of the two axes. The report, and `tools.studies`, say whether the stored results show it.

    Numbers of a series are compared with those of another at equal labels, which are seeds then; the number
    is the mean over them, with its 95% interval (Student's t), of all points or of those `at` a number on x.
    For a *front*, the points of a series with the same label make a line, without the points that another one
    beats on both axes; the number is the distance of `of` from `than` along `axis`, averaged over the part of
    the other axis that both lines reach, or over its logarithm if that axis is logarithmic. A correlation is
    Pearson's, over all points of `of`, or of the figure, with Fisher's interval."""

    paper: str = execution(description="what the paper measured, or that it states no number")
    form: Literal["difference", "front", "correlation"] = execution("difference")
    of: str = execution("", description="a series; all of them for a correlation, if empty")
    than: str = execution("", description="the series that `of` is compared with")
    axis: Literal["x", "y"] = execution("y", description="the axis of the difference")
    at: float | None = execution(
        None, description="the number on x of the points that a difference compares; all points, if not set"
    )
    expected: Literal["below", "above", "at"] = execution(
        description="the side of 0 on which the paper's number is; at: the paper sees no difference"
    )
    cannot: str = execution(
        "", description="why results of this size would say nothing of the paper's if they show no difference"
    )

    def problems(self, figure: FigureSpec) -> Iterator[str]:
        named = [self.of, self.than] if self.form != "correlation" else [self.of] if self.of else []
        yield from (
            f"'{series}' is no series of the figure" for series in named if series not in figure.series
        )
        if self.form == "correlation" and figure.form != "points":
            yield "a correlation needs points, where both axes have a metric"
        if self.form == "front" and figure.form == "bars":
            yield "a front needs points or lines"
        if self.form == "difference" and (figure.form == "lines" or not getattr(figure, self.axis).metric):
            yield f"the figure has no single number on {self.axis}"
        if self.form == "front" and not (figure.x.better and figure.y.better):
            yield "a front needs `better` of both axes"
        if self.at is not None and (self.form != "difference" or figure.form != "points"):
            yield "`at` is for a difference of points, where both axes have a metric"
        if self.form == "correlation" and self.than:
            yield "a correlation is of one set of points: leave out `than`"


class FigureSpec(Spec):
    """A figure of the report. If x has a metric, every variant is a point. If only y has one, every variant
    is a line over numbers where that metric has a `*`, and a bar otherwise."""

    title: str = execution()
    x: Axis = execution(default_factory=Axis)
    y: Axis = execution()
    series: dict[str, Variants] = execution(
        min_length=1,
        description="variants by name in the legend: one, a list, or a map of variants to the labels of "
        "their points. A variant with `*` is every stage that matches, labelled with the text of its first"
        " `*`",
    )
    times: str = execution(
        "", description="for lines: the metric of y's stage that multiplies the numbers on x"
    )
    connect: bool = execution(False, description="joins the points of a series by a line, in their order")
    front: bool = execution(False, description="draws the line of points that no other beats on both axes")
    mean: bool = execution(
        False,
        description="whether the variants of a series are runs with different seeds, of which the mean is"
        " drawn with its 95% interval (Student's t); with `connect`, one mean for each number on x",
    )
    ranks: bool = execution(
        False,
        description="for bars with mean: shows the rank of each series, the ranks that the seeds leave open,"
        " and the series that are not told apart",
    )
    against: str = execution(
        "",
        description="with mean: a series; the differences of the others from it are drawn, taken seed by"
        " seed: between variants with the same label, and with `connect` the same number on x",
    )
    text: str = execution("", description="caption")
    claims: dict[str, Claim] = execution(
        default_factory=dict, description="claims of a paper, each under a sentence that states it"
    )

    @property
    def form(self) -> Literal["lines", "points", "bars"]:
        if self.x.metric:
            return "points"
        return "lines" if "*" in self.y.metric else "bars"

    def conflicts(self) -> Iterator[str]:
        if not self.y.metric:
            yield "y needs a stage and a metric"
        if "*" in self.x.metric or (self.x.metric and "*" in self.y.metric):
            yield "only the metric of y may have a *, for the numbers on x; x has no metric then"
        if (self.connect or self.front) and self.form != "points":
            yield "connect and front are for points, where both axes have a metric"
        if self.front and not (self.x.better and self.y.better):
            yield "front needs `better` of both axes"
        if self.times and self.form != "lines":
            yield "times is for lines, where the metric of y has a *"
        if self.mean and self.form == "lines":
            yield "mean is for points and bars; a line has its own interval"
        if self.ranks and (not self.mean or self.form != "bars" or not self.y.better or self.against):
            yield "ranks are for bars with mean: true and `better` of y, without against"
        if self.against and (not self.mean or self.against not in self.series):
            yield f"against names a series of a figure with mean: true; use one of {', '.join(self.series)}"
        for text, claim in self.claims.items():
            for problem in claim.problems(self):
                yield f"claim '{text}': {problem}"

    def axes(self) -> list[tuple[str, Axis]]:
        """The axes that read a metric, with their names."""
        return [(name, axis) for name, axis in (("x", self.x), ("y", self.y)) if axis.metric]

    def variants(self, stages: Iterable[str]) -> dict[str, dict[str, str]]:
        """The variants with their labels, by series. A variant with `*` stands for every variant for which y
        has a stage among `stages`."""
        return {name: _matching(self.y.stage, labels, stages) for name, labels in self.series.items()}


def _matching(pattern: str, labels: dict[str, str], stages: Iterable[str]) -> dict[str, str]:
    before, _, after = pattern.partition(VARIANT)
    texts: dict[str, str] = {}
    for variant, text in labels.items():
        if "*" not in variant:
            texts[variant] = text
            continue
        for stage in stages:
            name = stage[len(before) : len(stage) - len(after)]
            stars = re.fullmatch(re.escape(variant).replace(r"\*", "(.*?)"), name)
            if stage == f"{before}{name}{after}" and stars:
                texts[name] = text or stars[1]
    return texts


def misnamed(figures: Mapping[str, FigureSpec], stages: Iterable[str]) -> Iterator[Problem]:
    """Problems of figures that name a stage that is not in `stages`, or variants that match none of them."""
    known = list(stages)
    for name, figure in figures.items():
        for series, variants in figure.variants(known).items():
            if not variants:
                message = f"no stage matches '{', '.join(figure.series[series])}' in {figure.y.stage}"
                yield Problem(("figures", name, "series", series), message, "name variants of that stage.")
            for axis, variant in ((axis, variant) for axis in figure.axes() for variant in variants):
                if (stage := axis[1].stage.replace(VARIANT, variant)) not in known:
                    message = f"there is no stage '{stage}'"
                    yield Problem(("figures", name, axis[0], "stage"), message, did_you_mean(stage, known))
