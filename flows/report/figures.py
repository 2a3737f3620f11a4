"""The base of all charts: colours, panels over one axis, and figures as plain JSON for plotly.js.

Invariants: a stage and a source have one colour, line and symbol in all charts. Every text in a figure has
passed `label`, so that none is read as markup; the page sets the colours of text and grid.
"""

import html
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import plotly.graph_objects as go

# In the order of use. The first five are distinct with protanopia and deuteranopia, on light and on dark.
STAGE_COLOURS = ("#2477d4", "#e5853b", "#1fa67a", "#8e3fa8", "#8a5a1f", "#c2466a", "#9c9a1f")
SERIES_COLOURS = STAGE_COLOURS
SOURCE_COLOURS = ("#1b7a6b", "#d3a021", "#a0429b", "#4ba3d9", "#b5532a", "#7f8c2f", "#6b7480")
NEUTRAL = "#7d8590"
DASHES = ("solid", "dash", "dot", "dashdot")
SYMBOLS = ("circle", "square", "diamond", "triangle-up", "cross", "x", "star", "hexagon")
PANEL_GAP = 44  # pixels between panels, room for the next one's title
TOP, BOTTOM = 26, 40


@dataclass(frozen=True)
class Style:
    """The look of a stage or source in all charts."""

    colour: str
    dash: str = "solid"
    symbol: str = "circle"


class Styles(dict[str, Style]):
    """Styles by name, assigned in order; after the last colour, colours repeat with another line."""

    def __init__(self, names: Iterable[str], colours: tuple[str, ...]) -> None:
        super().__init__()
        for index, name in enumerate(dict.fromkeys(names)):
            turn, place = divmod(index, len(colours))
            self[name] = Style(colours[place], DASHES[turn % len(DASHES)], SYMBOLS[index % len(SYMBOLS)])


@dataclass(frozen=True)
class Entry:
    """A line of the legend, which shows and hides the traces of its group."""

    text: str
    group: str
    style: Style


@dataclass(frozen=True)
class Figure:
    title: str
    summary: str  # its content in words
    height: int
    plot: dict[str, Any]
    legend: list[Entry] = field(default_factory=list)  # drawn by the page, so that it wraps
    wide: bool = False
    text: str = ""  # caption


@dataclass(frozen=True)
class Panel:
    """One of several charts over the same horizontal axis."""

    title: str
    height: int
    traces: list[go.Scatter]
    axis: dict[str, Any] = field(default_factory=dict)


def label(text: object) -> str:
    """Text for a figure, escaped, since plotly.js interprets some HTML."""
    return html.escape(str(text), quote=False)


def short(names: Iterable[str]) -> dict[str, str]:
    """Names without a folder that all share: `corpus/code` and `corpus/notes` are `code` and `notes`."""
    unique = dict.fromkeys(names)
    folders = {name.rpartition("/")[0] for name in unique}
    return {name: name.rpartition("/")[2] if len(folders) == 1 else name for name in unique}


def plot(traces: list[Any], **layout: Any) -> dict[str, Any]:
    """Traces and layout, checked by Plotly, as JSON values."""
    base: dict[str, Any] = {
        "showlegend": False,
        "hovermode": "closest",
        "margin": {"l": 52, "r": 12, "t": TOP, "b": BOTTOM, "pad": 4},
        "uniformtext": {"mode": "hide", "minsize": 9},
    }
    document = go.Figure(data=traces, layout=base | layout).to_plotly_json()
    document["layout"].pop("template", None)
    return {"data": document["data"], "layout": document["layout"]}


def rows_plot(traces: list[Any], bottom: int, **layout: Any) -> dict[str, Any]:
    """A plot of rows with their names on the left; `bottom`: pixels for the horizontal axis."""
    return plot(traces, margin={"l": 12, "r": 18, "t": 8, "b": bottom, "pad": 6}, **layout)


def row_axis(count: int) -> dict[str, Any]:
    """A y axis of `count` rows, the first on top."""
    return {"type": "category", "automargin": True, "tickmode": "linear", "range": [count - 0.5, -0.5]}


def axis_title(text: str) -> dict[str, Any]:
    return {"text": text, "font": {"size": 12}, "standoff": 6}


def whiskers(
    intervals: Sequence[tuple[float, float | None, float | None]], colour: str | None, width: int = 5
) -> dict[str, Any] | None:
    """Error bars for (value, low, high); None where no value has an interval. `width`: of their ends."""
    if all(low is None or high is None for _, low, high in intervals):
        return None
    return {
        "type": "data",
        "array": [high - value if high is not None else 0.0 for value, _, high in intervals],
        "arrayminus": [value - low if low is not None else 0.0 for value, low, _ in intervals],
        "symmetric": False,
        "thickness": 1.6,
        "width": width,
        "color": colour,
    }


def panels(parts: list[Panel], xaxis: dict[str, Any]) -> tuple[dict[str, Any], int]:
    """Stacked panels over one horizontal axis: the plot and its height in pixels."""
    inner = sum(panel.height for panel in parts) + PANEL_GAP * (len(parts) - 1)
    traces, layout, titles = [], dict[str, Any](), []
    top = inner
    for index, panel in enumerate(parts):
        number = "" if index == 0 else str(index + 1)
        domain = [max(0.0, (top - panel.height) / inner), top / inner]
        layout[f"yaxis{number}"] = {
            "domain": domain,
            "exponentformat": "SI",
            "nticks": max(3, panel.height // 45),
        } | panel.axis
        titles.append(title_above(panel.title, domain[1]))
        traces += [trace.update(yaxis=f"y{number}", xaxis="x") for trace in panel.traces]
        top -= panel.height + PANEL_GAP
    layout["xaxis"] = {"anchor": f"y{len(parts) if len(parts) > 1 else ''}"} | xaxis
    return plot(traces, annotations=titles, **layout), inner + TOP + BOTTOM


def title_above(text: str, y: float) -> dict[str, Any]:
    across = {"x": 0, "xref": "paper", "xanchor": "left"}
    up = {"y": y, "yref": "paper", "yanchor": "bottom", "yshift": 3}
    return {"text": f"<b>{label(text)}</b>", "showarrow": False, "font": {"size": 12}} | across | up


TOKENS_AXIS = {
    "exponentformat": "B",
    "nticks": 8,
    "title": axis_title("consumed tokens"),
}
