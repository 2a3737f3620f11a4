"""Charts with a row for each language: what became of the documents of a corpus, and the parity of compared
tokenizers.

Invariants: an outcome has one colour in the pictures of all corpora; kept documents come first. Languages of
tokenizers are sorted by the mean of all of them, so a row is the same language for each tokenizer.
"""

from collections.abc import Mapping
from typing import Any

import plotly.graph_objects as go

from flows.format import quantity
from flows.languages import KEPT, LanguageCounts, filters_of
from flows.report.figures import (
    SERIES_COLOURS,
    Entry,
    Figure,
    Style,
    Styles,
    axis_title,
    label,
    row_axis,
    rows_plot,
    whiskers,
)
from flows.report.results import ComparedTokenizers
from specs.tokenizer_comparison import Comparison, Estimate

ROW, MARGIN = 22, 84  # pixels
REFERENCE = {"type": "line", "xref": "x", "yref": "paper", "x0": 1, "x1": 1, "y0": 0, "y1": 1}


def outcomes(corpora: Mapping[str, list[LanguageCounts]]) -> list[Figure]:
    """For each corpus with languages, bars: the shares of documents kept, and removed by each filter."""
    names = filters_of(language for languages in corpora.values() for language in languages)
    look = Styles([KEPT, *names], (SERIES_COLOURS[2], *SERIES_COLOURS[:2], *SERIES_COLOURS[3:]))
    return [_outcomes_of(corpus, languages, look) for corpus, languages in corpora.items() if languages]


def _outcomes_of(corpus: str, languages: list[LanguageCounts], look: Styles) -> Figure:
    rows = [label(f"{row.language or 'not stated'} ({quantity(row.documents)})") for row in languages]
    counts = {KEPT: [row.kept for row in languages]}
    counts |= {name: [row.removed[name] for row in languages] for name in filters_of(languages)}
    traces = [
        go.Bar(
            x=[
                count / row.documents if row.documents else 0
                for count, row in zip(of_outcome, languages, strict=True)
            ],
            y=rows,
            customdata=of_outcome,
            orientation="h",
            name=label(name),
            legendgroup=f"{corpus} {name}",
            marker={"color": look[name].colour},
            hovertemplate="%{y}<br>%{fullData.name}: %{customdata:,} documents, %{x:.1%}<extra></extra>",
        )
        for name, of_outcome in counts.items()
    ]
    shares = {"title": axis_title("share of the documents that were read"), "range": [0, 1]}
    legend = [Entry(name, f"{corpus} {name}", Style(look[name].colour)) for name in counts]
    return _figure(
        f"Languages: {corpus}",
        "What became of the documents of each language; in brackets how many were read.",
        traces,
        legend,
        len(languages),
        barmode="stack",
        bargap=0.25,
        xaxis=shares | {"tickformat": ".0%", "side": "bottom"},
    )


def parities(compared: ComparedTokenizers) -> Figure:
    """A point for each tokenizer in the row of each language."""
    comparison, look = compared.comparison, Styles(compared.names, SERIES_COLOURS)
    languages = by_cost(comparison)
    traces = []
    for name in compared.names:
        points = [_parity(comparison, name, language) for language in languages]
        style = look[name]
        traces.append(
            go.Scatter(
                x=[point.value for point in points],
                y=[label(language) for language in languages],
                mode="markers",
                name=label(name),
                legendgroup=f"{compared.name} {name}",
                marker={"color": style.colour, "symbol": style.symbol, "size": 9},
                error_x=whiskers([(point.value, point.low, point.high) for point in points], style.colour, 4),
                cliponaxis=False,
                hovertemplate="%{fullData.name}<br>%{y}: %{x:.3g}<extra></extra>",
            )
        )
    ginis = {name: comparison.tokenizers[name].measures["gini"].value for name in compared.names}
    relative = axis_title(f"tokens relative to {label(comparison.parity_to)}")
    return _figure(
        f"Parity: {compared.name}",
        f"Tokens of the same {comparison.lines:,} lines, relative to {comparison.parity_to}; whiskers are 95%"
        " intervals over lines. At 2, the same text takes twice the tokens of training, and a context holds"
        " half of it.",
        traces,
        [Entry(f"{n}: Gini {gini:.3f}", f"{compared.name} {n}", look[n]) for n, gini in ginis.items()],
        len(languages),
        xaxis={"title": relative, "rangemode": "tozero", "nticks": 10, "side": "bottom"},
        shapes=[REFERENCE | {"line": {"width": 1, "dash": "dot", "color": "rgba(127,127,127,.7)"}}],
    )


def by_cost(comparison: Comparison) -> list[str]:
    """The languages, sorted by the mean of the tokenizers' parities, most tokens first."""

    def cost(language: str) -> float:
        return sum(_parity(comparison, name, language).value for name in comparison.tokenizers)

    return sorted(comparison.languages, key=lambda language: (-cost(language), language))


def _parity(comparison: Comparison, tokenizer: str, language: str) -> Estimate:
    parity = comparison.tokenizers[tokenizer].languages[language].measures["parity"]
    assert parity is not None, "checked when it was read"
    return parity


def _figure(
    title: str, summary: str, traces: list[Any], legend: list[Entry], rows: int, **layout: Any
) -> Figure:
    drawn = rows_plot(traces, 44, yaxis=row_axis(rows), **layout)
    return Figure(title, summary, MARGIN + ROW * rows, drawn, legend, wide=True)
