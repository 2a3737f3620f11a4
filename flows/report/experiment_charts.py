"""Charts of the figures of a recipe: points, lines with bands, bars, and means with whiskers.

Invariant: a figure of which nothing is stored is left out.
"""

from collections.abc import Mapping
from typing import Any

import plotly.graph_objects as go

from flows.format import in_full
from flows.report.experiments import Experiment, FigurePoint, front, place_of
from flows.report.figures import SERIES_COLOURS, Entry, Figure, Styles, label, plot, whiskers
from flows.report.ranks import not_told_apart, ranks
from specs.errors import counted
from specs.figures import Axis, FigureSpec

HEIGHT = 380
MOST_PLACES = 12  # a figure of lines with at most so many places spaces them evenly
SIDES = ("top center", "bottom center", "middle left", "middle right")  # of a point, for its text
Drawn = tuple[list[Any], dict[str, Any]]
"""The traces and the layout of a plot."""


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
    if spec.ranks:
        sentences.append(
            f"Below a name: its rank (ranks that the seeds leave open). {not_told_apart(experiment)}"
        )
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
    places = sorted({place_of(point) for point in experiment.all_points})
    few = len(places) <= MOST_PLACES
    traces: list[Any] = []
    for series, points in experiment.points.items():
        style, group = look[series], _group(name, series)
        for variant in dict.fromkeys(point.variant for point in points):
            line = [point for point in points if point.variant == variant]
            at = [places.index(place_of(point)) if few else place_of(point) for point in line]
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


def _draw_bars(name: str, experiment: Experiment, look: Styles) -> Drawn:
    """A bar for each variant, side by side in the colour of its series; a mark for each mean."""
    traces: list[Any] = []
    texts = any(point.text for point in experiment.all_points)
    below = {rank.series: f"<br>{rank.shown}" for rank in ranks(experiment)} if experiment.spec.ranks else {}
    for series, points in experiment.points.items():
        named: list[Any] = [label(series) + below.get(series, "")] * len(points)
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
