"""Draws the languages of a corpus: what became of the documents of each language.

Invariant: an outcome has one colour in the pictures of all corpora; kept documents come first.
"""

from __future__ import annotations

from collections.abc import Sequence

import plotly.graph_objects as go

from flows.format import quantity
from flows.languages import KEPT, Language, filters_of
from flows.report.figures import SERIES_COLOURS, Entry, Figure, Style, Styles, category_axis, label, plot

ROW, MARGIN = 22, 84  # pixels


def outcomes(corpora: Sequence[tuple[str, list[Language]]]) -> list[Figure]:
    """A figure for each corpus that has languages: a row for each language, with bars for the shares of its
    documents that were kept, and that each filter removed."""
    names = filters_of(one for _, languages in corpora for one in languages)
    look = Styles([KEPT, *names], (SERIES_COLOURS[2], *SERIES_COLOURS[:2], *SERIES_COLOURS[3:]))
    return [_figure(corpus, languages, look) for corpus, languages in corpora if languages]


def _figure(corpus: str, languages: list[Language], look: Styles) -> Figure:
    rows = [label(f"{one.language or 'not stated'} ({quantity(one.documents)})") for one in languages]
    counts = {KEPT: [one.kept for one in languages]}
    counts |= {name: [one.removed[name] for one in languages] for name in filters_of(languages)}
    traces = [
        go.Bar(
            x=[
                count / one.documents if one.documents else 0
                for count, one in zip(found, languages, strict=True)
            ],
            y=rows,
            customdata=found,
            orientation="h",
            name=label(name),
            legendgroup=f"{corpus} {name}",
            marker={"color": look[name].colour},
            hovertemplate="%{y}<br>%{fullData.name}: %{customdata:,} documents, %{x:.1%}<extra></extra>",
        )
        for name, found in counts.items()
    ]
    drawn = plot(
        traces,
        barmode="stack",
        bargap=0.25,
        xaxis={
            "title": {"text": "share of the documents that were read", "font": {"size": 12}, "standoff": 6},
            "range": [0, 1],
            "tickformat": ".0%",
            "side": "bottom",
        },
        yaxis=category_axis(len(languages)),
        margin={"l": 12, "r": 18, "t": 8, "b": 44, "pad": 6},
    )
    legend = [Entry(name, f"{corpus} {name}", Style(look[name].colour)) for name in counts]
    summary = "What became of the documents of each language; in brackets how many were read."
    return Figure(f"Languages: {corpus}", summary, MARGIN + ROW * len(languages), drawn, legend, wide=True)
