"""Draws compared tokenizers: parity of each language, with intervals.

Invariant: languages are sorted by the mean of all tokenizers, so a row is the same language for each
tokenizer.
"""

from __future__ import annotations

import plotly.graph_objects as go

from flows.report.figures import SERIES_COLOURS, Entry, Figure, Styles, category_axis, label, plot
from flows.report.results import ComparedTokenizers
from specs.tokenizer_comparison import Comparison, Estimate

ROW, MARGIN = 22, 84  # pixels


def parities(compared: ComparedTokenizers) -> Figure:
    """A row for each language, a point for each tokenizer."""
    found, look = compared.comparison, Styles(compared.names, SERIES_COLOURS)
    languages = by_cost(found)
    traces = []
    for name in compared.names:
        points = [_parity(found, name, language) for language in languages]
        traces.append(
            go.Scatter(
                x=[point.value for point in points],
                y=[label(language) for language in languages],
                mode="markers",
                name=label(name),
                legendgroup=_group(compared.name, name),
                marker={"color": look[name].colour, "symbol": look[name].symbol, "size": 9},
                error_x={
                    "type": "data",
                    "array": [point.high - point.value for point in points],
                    "arrayminus": [point.value - point.low for point in points],
                    "symmetric": False,
                    "thickness": 1.6,
                    "width": 4,
                    "color": look[name].colour,
                },
                cliponaxis=False,
                hovertemplate="%{fullData.name}<br>%{y}: %{x:.3g}<extra></extra>",
            )
        )
    reference = label(found.parity_to)
    drawn = plot(
        traces,
        xaxis={
            "title": {"text": f"tokens relative to {reference}", "font": {"size": 12}, "standoff": 6},
            "rangemode": "tozero",
            "nticks": 10,
            "side": "bottom",
        },
        yaxis=category_axis(len(languages)),
        shapes=[
            {
                "type": "line",
                "xref": "x",
                "yref": "paper",
                "x0": 1,
                "x1": 1,
                "y0": 0,
                "y1": 1,
                "line": {"width": 1, "dash": "dot", "color": "rgba(127,127,127,.7)"},
            }
        ],
        margin={"l": 12, "r": 18, "t": 8, "b": 44, "pad": 6},
    )
    legend = [
        Entry(
            f"{name}: Gini {found.tokenizers[name].measures['gini'].value:.3f}",
            _group(compared.name, name),
            look[name],
        )
        for name in compared.names
    ]
    summary = (
        f"Tokens of the same {found.lines:,} lines, relative to {found.parity_to}; whiskers are 95% intervals"
        " over lines. At 2, the same text takes twice the tokens of training, and a context holds half of it."
    )
    return Figure(
        f"Parity: {compared.name}", summary, MARGIN + ROW * len(languages), drawn, legend, wide=True
    )


def by_cost(found: Comparison) -> list[str]:
    """The languages, sorted by the mean of the tokenizers' parities, most tokens first."""

    def cost(language: str) -> float:
        return sum(_parity(found, name, language).value for name in found.tokenizers)

    return sorted(found.languages, key=lambda language: (-cost(language), language))


def _parity(found: Comparison, tokenizer: str, language: str) -> Estimate:
    parity = found.tokenizers[tokenizer].languages[language].measures["parity"]
    assert parity is not None, "checked when it was read"
    return parity


def _group(evaluation: str, tokenizer: str) -> str:
    return f"{evaluation} {tokenizer}"
