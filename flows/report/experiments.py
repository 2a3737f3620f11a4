"""The figures of a recipe (`specs/figures.py`): numbers of stored parts, and their charts.

Invariant: only stored numbers are drawn. A variant or a figure without a number is left out and named.
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import NormalDist, fmean, stdev
from typing import Any, NamedTuple

import plotly.graph_objects as go

from flows.format import in_full
from flows.report.figures import SERIES_COLOURS, Entry, Figure, Styles, label, plot, whiskers
from flows.report.results import numbers
from specs.errors import counted
from specs.figures import VARIANT, Axis, FigureSpec

HEIGHT = 380
MOST_PLACES = 12  # a figure of lines with at most so many places spaces them evenly
T_QUANTILES = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
SIDES = ("top center", "bottom center", "middle left", "middle right")  # of a point, for its text
Metrics = Mapping[str, Mapping[str, float]]
"""Stage -> the numbers of its result, `val_loss` among them if it was measured at the stage's end."""


class Measurement(NamedTuple):
    """A number, and its interval if it has one."""

    value: float
    low: float | None = None
    high: float | None = None


Drawn = tuple[list[Any], dict[str, Any]]
"""The traces and the layout of a plot."""


@dataclass(frozen=True)
class FigurePoint:
    """One point: a variant, or one number of a line."""

    variant: str
    text: str  # label beside the point
    x: Measurement | None  # None for a bar
    y: Measurement


Points = Mapping[str, list[FigurePoint]]
"""Points by series."""


@dataclass
class Experiment:
    """A figure of the recipe with its points."""

    spec: FigureSpec
    points: dict[str, list[FigurePoint]] = field(default_factory=dict)  # by series
    single: dict[str, list[FigurePoint]] = field(default_factory=dict)  # without means and differences
    missing: list[str] = field(default_factory=list)  # variants that are not stored yet

    @property
    def all_points(self) -> list[FigurePoint]:
        return [point for points in self.points.values() for point in points]


def experiment_of(spec: FigureSpec, metrics: Metrics) -> Experiment:
    """The points of a figure. `metrics` has every stage of the recipe."""
    experiment = Experiment(spec)
    for series, variants in spec.variants(metrics).items():
        for variant, text in variants.items():
            points = list(_points(spec, variant, text, metrics))
            experiment.points.setdefault(series, []).extend(points)
            if not points:
                experiment.missing.append(variant)
    experiment.single = experiment.points
    if spec.mean:
        experiment.points = {series: _means(spec, series, experiment.points) for series in experiment.points}
        experiment.points.pop(spec.against, None)
    return experiment


def _means(spec: FigureSpec, series: str, points: Points) -> list[FigurePoint]:
    """The mean of a series; where points are joined, the mean at each of their numbers on x, in order."""
    if not spec.connect:
        return _mean(spec, series, points)
    places = sorted({_place(point) for point in points[series]})
    means = [(place, _mean(spec, series, points_at(points, place))) for place in places]
    return [replace(point, x=Measurement(place)) for place, at_place in means for point in at_place]


def points_at(points: Points, place: float) -> dict[str, list[FigurePoint]]:
    """The points of every series whose number on x is `place`."""
    return {
        series: [point for point in own if point.x is not None and point.x.value == place]
        for series, own in points.items()
    }


def _mean(spec: FigureSpec, series: str, points: Points) -> list[FigurePoint]:
    """The mean of a series, or of its differences from `against` at equal labels; none without numbers."""
    own = points[series]
    if spec.against:
        others = {point.text: point for point in points[spec.against]}
        own = [_minus(point, others[point.text]) for point in own if point.text in others]
    if not own:
        return []
    xs = [point.x.value for point in own if point.x is not None]
    return [FigurePoint(series, "", mean(xs) if xs else None, mean([point.y.value for point in own]))]


def _minus(point: FigurePoint, other: FigurePoint) -> FigurePoint:
    x = Measurement(point.x.value - other.x.value) if point.x is not None and other.x is not None else None
    return FigurePoint(point.variant, point.text, x, Measurement(point.y.value - other.y.value))


def mean(values: Sequence[float]) -> Measurement:
    """The mean with its 95% interval by Student's t; a single number has none."""
    middle, count = fmean(values), len(values)
    if count < 2:
        return Measurement(middle)
    spread = student_t(count - 1) * stdev(values) / math.sqrt(count)
    return Measurement(middle, middle - spread, middle + spread)


def student_t(freedom: int) -> float:
    """The 97.5% quantile of Student's t. From a table up to 10 degrees of freedom, then by the expansion in
    1 / freedom (Abramowitz and Stegun 26.7.5), whose error is below 0.001."""
    if freedom <= len(T_QUANTILES):
        return T_QUANTILES[freedom - 1]
    z = NormalDist().inv_cdf(0.975)
    first, second = (z**3 + z) / 4, (5 * z**5 + 16 * z**3 + 3 * z) / 96
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + first / freedom + second / freedom**2 + third / freedom**3


def _points(spec: FigureSpec, variant: str, text: str, metrics: Metrics) -> Iterator[FigurePoint]:
    of_y = _of(spec.y, variant, metrics)
    if spec.form == "lines":
        assert isinstance(spec.y.metric, str), "several metrics have no *"
        before, _, after = spec.y.metric.partition("*")
        times = of_y.get(spec.times, 0.0) if spec.times else 1.0
        numbered = re.compile(rf"{re.escape(before)}(\d+){re.escape(after)}")
        places = sorted(int(match[1]) for match in map(numbered.fullmatch, of_y) if match)
        for place in places if times else ():
            y = _value(of_y, f"{before}{place}{after}")
            assert y is not None, "the name is one of these"
            yield FigurePoint(variant, text, Measurement(place * times), y)
        return
    y = _value(of_y, spec.y.metric)
    x = _value(_of(spec.x, variant, metrics), spec.x.metric) if spec.x.metric else None
    if y is not None and (x is not None or not spec.x.metric):
        yield FigurePoint(variant, text, x, y)


def _of(axis: Axis, variant: str, metrics: Metrics) -> Mapping[str, float]:
    return numbers(metrics.get(axis.stage.replace(VARIANT, variant), {}))


def _value(metrics: Mapping[str, float], metric: str | list[str]) -> Measurement | None:
    """A number with its interval if it has one, or the mean of several numbers."""
    names = [metric] if isinstance(metric, str) else metric
    if not metrics.keys() >= {*names}:
        return None
    interval = (metrics.get(f"{metric}/{end}") for end in ("low", "high"))
    return Measurement(fmean(metrics[name] for name in names), *interval)


def front(points: list[FigurePoint], x_better: str | None, y_better: str | None) -> list[FigurePoint]:
    """The points, in the order of x, that no other beats: none is as good on both axes, better on one."""
    assert x_better and y_better, "the spec requires `better` of both axes"
    signs = (1 if x_better == "lower" else -1, 1 if y_better == "lower" else -1)
    costs = [(signs[0] * point.x.value, signs[1] * point.y.value) for point in points if point.x is not None]
    kept = [
        point
        for point, own in zip(points, costs, strict=True)
        if not any(other != own and other[0] <= own[0] and other[1] <= own[1] for other in costs)
    ]
    return sorted(kept, key=lambda point: point.x.value if point.x else 0.0)


# Drawing


def draw(name: str, experiment: Experiment) -> Figure | None:
    """The chart; None where nothing is stored yet."""
    if not experiment.all_points:
        return None
    spec, look = experiment.spec, Styles(experiment.spec.series, SERIES_COLOURS)
    make = {"points": _draw_points, "lines": _draw_lines, "bars": _draw_bars}[spec.form]
    traces, layout = make(name, experiment, look)
    drawn = plot(traces, margin={"l": 64, "r": 24, "t": 14, "b": 54, "pad": 4}, **layout)
    drawn_series = [series for series in spec.series if experiment.points.get(series) and spec.form != "bars"]
    legend = [Entry(series, _group(name, series), look[series]) for series in drawn_series]
    return Figure(spec.title, _summary(experiment, layout), HEIGHT, drawn, legend, text=spec.text)


def _summary(experiment: Experiment, layout: Mapping[str, Any]) -> str:
    """The better direction of each axis, the meaning of intervals, and what has no place on an axis."""
    spec = experiment.spec
    better = "; ".join(
        f"{axis.label or axis.metric}: {axis.better} is better" for axis in (spec.x, spec.y) if axis.better
    )
    sentences = [f"{better[:1].upper()}{better[1:]}."] if better else []
    values = [value for point in experiment.all_points for value in (point.x, point.y)]
    if any(value is not None and value.low is not None for value in values):
        over = " over seeds" if spec.mean else ""
        sentences.append(f"{'Bands' if spec.form == 'lines' else 'Whiskers'} are 95% intervals{over}.")
    if spec.front:
        sentences.append("The broad line joins those that none beats on both axes.")
    for name in ("x", "y"):
        values = [getattr(point, name) for point in experiment.all_points]
        count = sum(value is not None and value.value <= 0 for value in values)
        if count and layout[f"{name}axis"]["type"] == "log":
            sentences.append(f"Not drawn: {counted(count, 'point')} at 0 or below, on a logarithmic axis.")
    return " ".join(sentences)


def _group(name: str, series: str) -> str:
    return f"{name} {series}"


def _axis(axis: Axis) -> dict[str, Any]:
    return {
        "title": {"text": label(axis.label or axis.metric), "font": {"size": 12.5}, "standoff": 8},
        "type": axis.scale,
        "nticks": 7,
        "automargin": True,
    } | ({"dtick": "D2"} if axis.scale == "log" else {})


def _draw_points(name: str, experiment: Experiment, look: Styles) -> Drawn:
    spec = experiment.spec
    traces: list[Any] = []
    if spec.front and len(best := front(experiment.all_points, spec.x.better, spec.y.better)) > 1:
        traces.append(_staircase(best, spec))
    for order, (series, points) in enumerate(experiment.points.items()):
        values = [(point.x, point.y) for point in points if point.x is not None]
        style = look[series]
        traces.append(
            go.Scatter(
                x=[x.value for x, _ in values],
                y=[y.value for _, y in values],
                mode="markers+text" + "+lines" * spec.connect,
                name=label(series),
                legendgroup=_group(name, series),
                text=[label(point.text) for point in points],
                textposition=[
                    SIDES[(order if spec.connect else index) % len(SIDES)] for index in range(len(points))
                ],
                textfont={"size": 11},
                marker={
                    "color": style.colour,
                    "symbol": style.symbol,
                    "size": 11,
                    "line": {"width": 1, "color": "rgba(127,127,127,.4)"},
                },
                line={"color": style.colour, "width": 1.6, "dash": style.dash},
                error_x=whiskers([x for x, _ in values], style.colour),
                error_y=whiskers([y for _, y in values], style.colour),
                customdata=[label(point.variant) for point in points],
                cliponaxis=False,
                hovertemplate="%{fullData.name}, %{customdata}<br>%{x:.4g}, %{y:.4g}<extra></extra>",
            )
        )
    return traces, {"xaxis": _axis(spec.x), "yaxis": _axis(spec.y)}


def _staircase(best: list[FigurePoint], spec: FigureSpec) -> Any:
    """The front as steps: a point holds until the next better one."""
    shape = "hv" if spec.x.better == "lower" else "vh"
    return go.Scatter(
        x=[point.x.value for point in best if point.x is not None],
        y=[point.y.value for point in best],
        mode="lines",
        line={"shape": shape, "width": 9, "color": "rgba(127,127,127,.22)"},
        hoverinfo="skip",
    )


def _draw_lines(name: str, experiment: Experiment, look: Styles) -> Drawn:
    """Lines with bands of intervals: over a few evenly spaced numbers, or over many on the axis's scale."""
    spec = experiment.spec
    places = sorted({_place(point) for point in experiment.all_points})
    few = len(places) <= MOST_PLACES
    traces: list[Any] = []
    for series, points in experiment.points.items():
        style, group = look[series], _group(name, series)
        for variant in dict.fromkeys(point.variant for point in points):
            line = [point for point in points if point.variant == variant]
            at = [places.index(_place(point)) if few else _place(point) for point in line]
            if all(point.y.low is not None and point.y.high is not None for point in line):
                edge = [point.y.low for point in line] + [point.y.high for point in reversed(line)]
                band = {
                    "fill": "toself",
                    "fillcolor": _faint(style.colour),
                    "line": {"width": 0},
                    "hoverinfo": "skip",
                }
                traces.append(go.Scatter(x=at + at[::-1], y=edge, mode="lines", legendgroup=group, **band))
            traces.append(
                go.Scatter(
                    x=at,
                    y=[point.y.value for point in line],
                    mode="lines+markers" if few else "lines",
                    name=label(series),
                    legendgroup=group,
                    line={"color": style.colour, "width": 2.4, "dash": style.dash},
                    marker={"symbol": style.symbol, "size": 8},
                    customdata=[label(variant)] * len(line),
                    cliponaxis=False,
                    hovertemplate="%{fullData.name}, %{customdata}<br>%{y:.4g}<extra></extra>",
                )
            )
    axis = _axis(spec.x)
    ticks = {
        "tickmode": "array",
        "tickvals": list(range(len(places))),
        "ticktext": [in_full(place, 3) for place in places],
        "type": "linear",
    }
    return traces, {"xaxis": axis | ticks if few else axis, "yaxis": _axis(spec.y) | {"rangemode": "tozero"}}


def _place(point: FigurePoint) -> float:
    assert point.x is not None, "a point of a line has a number"
    return point.x.value


def _draw_bars(name: str, experiment: Experiment, look: Styles) -> Drawn:
    """A bar for each variant, side by side in the colour of its series; a mark for each mean."""
    traces: list[Any] = []
    texts = any(point.text for point in experiment.all_points)
    for series, points in experiment.points.items():
        named: list[Any] = [label(series)] * len(points)
        if texts:  # two rows of labels
            named = [named, [label(point.text) for point in points]]
        values = [point.y.value for point in points]
        if experiment.spec.mean:
            traces.append(
                go.Scatter(
                    x=named,
                    y=values,
                    mode="markers",
                    name=label(series),
                    legendgroup=_group(name, series),
                    marker={"color": look[series].colour, "symbol": look[series].symbol, "size": 11},
                    error_y=whiskers([point.y for point in points], look[series].colour),
                    hovertemplate="%{x}: %{y:.4g}<extra></extra>",
                )
            )
            continue
        traces.append(
            go.Bar(
                x=named,
                y=values,
                name=label(series),
                legendgroup=_group(name, series),
                marker={"color": look[series].colour},
                error_y=whiskers([point.y for point in points], "rgba(127,127,127,.9)"),
                text=[in_full(point.y.value, 3) for point in points],
                textposition="inside",
                insidetextanchor="start",
                insidetextfont={"color": "#ffffff"},
                hovertemplate="%{x}: %{y:.4g}<extra></extra>",
            )
        )
    return traces, {
        "xaxis": _axis(experiment.spec.x) | {"type": "multicategory" if texts else "category", "nticks": 0},
        "yaxis": _axis(experiment.spec.y),
        "bargap": 0.3,
    }


def _faint(colour: str) -> str:
    """The colour of a band: `#2477d4` -> `rgba(36,119,212,0.16)`."""
    red, green, blue = (int(colour[index : index + 2], 16) for index in (1, 3, 5))
    return f"rgba({red},{green},{blue},0.16)"
