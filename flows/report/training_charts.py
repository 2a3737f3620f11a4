"""Charts of training and its data: losses, learning rate, masked share, mixtures.

Invariant: horizontal axes are consumed tokens of the lineage, so a branch overlays its parent.
"""

from typing import Any

import plotly.graph_objects as go

from flows.report.figures import TOKENS_AXIS, Entry, Figure, Panel, Styles, label, panels, rows_plot, short
from flows.report.history import Curve, Series
from flows.report.run_data import Share
from specs.stages import STAGES, TRAINING
from specs.stages.preference_training import PairTraining

# kinds whose loss is not in nats per token
OWN_LOSS = tuple(kind for kind in TRAINING if issubclass(STAGES[kind], PairTraining))
COLUMNS = {
    "loss": "training loss",
    "lr": "learning rate",
    "grad_norm": "gradient norm",
    "tokens_per_second": "tokens per second",
}

LR_AXIS = {"exponentformat": "power", "rangemode": "tozero"}


def losses(curves: list[Curve], stages: Styles, sources: Styles) -> Figure | None:
    """Losses, learning rate, gradient norm and speed of all stages trained on the next token."""
    shown = [curve for curve in curves if not _has_own_loss(curve)]
    heldout = [curve for curve in curves if curve.heldout]
    if not shown and not heldout:
        return None
    parts = [Panel("training loss (nats per token)", 280, _lines(shown, "loss", stages))]
    if heldout:
        parts.append(Panel("held-out loss by source (nats per token)", 190, _heldout(heldout, sources)))
    parts.append(Panel("learning rate", 110, _plain(shown, "lr", stages), LR_AXIS))
    for name in ("grad_norm", "tokens_per_second"):
        if any(name in curve.columns for curve in shown):
            parts.append(Panel(COLUMNS[name], 110, _lines(shown, name, stages), {"rangemode": "tozero"}))
    drawn, height = panels([panel for panel in parts if panel.traces], TOKENS_AXIS)
    legend = [Entry(curve.stage, f"stage {curve.stage}", stages[curve.stage]) for curve in shown]
    measured = dict.fromkeys(name for curve in heldout for name in curve.heldout)
    legend += [Entry(text, f"source {name}", sources[name]) for name, text in short(measured).items()]
    summary = "Thin: every step; thick: running mean. A stage begins at the tokens of its parent checkpoint."
    return Figure("Loss and learning rate", summary, height, drawn, legend, wide=True)


def own_losses(curve: Curve, stages: Styles) -> Figure:
    """The columns of one stage in small panels: all if its loss is of another kind, else the further ones."""
    own = _has_own_loss(curve)
    names = [*(name for name in COLUMNS if name in curve.columns and own), *curve.extras]
    parts = []
    for name in names:
        title = f"loss ({curve.kind})" if name == "loss" else COLUMNS.get(name, name.replace("_", " "))
        traces, axis = (_plain, LR_AXIS) if name == "lr" else (_lines, {})
        parts.append(Panel(title, 110, traces([curve], name, stages), axis))
    drawn, height = panels(parts, TOKENS_AXIS)
    alone = "Its loss is not per token, so it has a separate chart."
    what = alone if own else "Further recorded numbers."
    return Figure(curve.stage, what, height, drawn)


def norms(curve: Curve, stages: Styles) -> Figure:
    """The norms of weights and optimizer states, a panel for each kind and a line for each layer."""
    parts: dict[str, Panel] = {}
    for name, series in curve.norms.items():
        kind, layer = name.split("/", 1)
        shown = f"{label(layer)}<br>%{{y:.4g}} at %{{x}} tokens<extra></extra>"
        panel = parts.setdefault(kind, Panel(kind, 110, [], {"rangemode": "tozero"}))
        line = _line(curve, series, stages, width=1, hovertemplate=shown)
        panel.traces.append(line.update(mode="lines+markers", marker={"size": 3}))  # which may be one
    drawn, height = panels(list(parts.values()), TOKENS_AXIS)
    return Figure(f"Norms: {curve.stage}", "Of weights and optimizer states by layer.", height, drawn)


def _has_own_loss(curve: Curve) -> bool:
    """Whether the loss is not in nats per token; distances are those of mixers from attention."""
    return curve.kind in OWN_LOSS or any(name.startswith("distance_") for name in curve.extras)


def masked(curves: list[Curve], stages: Styles) -> Figure | None:
    shown = [curve for curve in curves if "masked_share" in curve.columns]
    if not shown:
        return None
    axis = {"tickformat": ".1~%", "rangemode": "tozero"}
    panel = Panel("tokens without a loss", 200, _lines(shown, "masked_share", stages), axis)
    drawn, height = panels([panel], TOKENS_AXIS)
    legend = [Entry(curve.stage, f"stage {curve.stage}", stages[curve.stage]) for curve in shown]
    summary = "Dropped by the Goldfish loss; in fine-tuning also masked tokens, such as prompts."
    return Figure("Masked share", summary, height, drawn, legend, wide=True)


def mixtures(shares_of: dict[str, list[Share]], sources: Styles) -> Figure:
    """Shares of the sources, a bar for each mixture."""
    names = list(shares_of)
    rows: dict[str, dict[str, Share]] = {}
    for name, shares in shares_of.items():
        for share in shares:
            rows.setdefault(share.source, {})[name] = share
    traces = [
        go.Bar(
            orientation="h",
            y=[label(name) for name in by_mixture],
            x=[share.share for share in by_mixture.values()],
            name=label(source),
            legendgroup=f"source {source}",
            marker={"color": sources[source].colour, "line": {"width": 1, "color": "rgba(127,127,127,.4)"}},
            text=[f"{share.share:.0%}" for share in by_mixture.values()],
            textposition="inside",
            insidetextanchor="middle",
            textangle=0,
            insidetextfont={"color": "#ffffff"},
            hovertemplate="%{y}<br>%{fullData.name}: %{x:.1%}<extra></extra>",
        )
        for source, by_mixture in rows.items()
    ]
    height = 56 + 40 * len(names)
    order = {"categoryorder": "array", "categoryarray": [label(name) for name in reversed(names)]}
    shared = {"range": [0, 1], "tickformat": ".0%", "nticks": 6, "fixedrange": True}
    named = {"type": "category", "automargin": True, "fixedrange": True, "showgrid": False} | order
    drawn = rows_plot(traces, 30, barmode="stack", bargap=0.3, xaxis=shared, yaxis=named)
    legend = [Entry(text, f"source {source}", sources[source]) for source, text in short(rows).items()]
    return Figure("Shares of the sources", "In training samples.", height, drawn, legend, wide=True)


def _lines(curves: list[Curve], name: str, stages: Styles) -> list[go.Scatter]:
    """Every step as a thin line, the running mean as a thick one."""
    traces = []
    for curve in curves:
        if name in curve.columns:
            mean: dict[str, Any] = {"hoverinfo": "skip", "hovertemplate": None}
            traces.append(_line(curve, curve.columns[name], stages, width=1, dash="solid", opacity=0.45))
            traces.append(_line(curve, curve.smooth[name], stages, width=2.4, **mean))
    return traces


def _plain(curves: list[Curve], name: str, stages: Styles) -> list[go.Scatter]:
    return [_line(curve, curve.columns[name], stages, width=2) for curve in curves if name in curve.columns]


def _line(
    curve: Curve, series: Series, stages: Styles, *, width: float, dash: str = "", **options: object
) -> go.Scatter:
    style = stages[curve.stage]
    described = {"hovertemplate": "%{fullData.name}<br>%{y} at %{x} tokens<extra></extra>"} | options
    return go.Scatter(
        x=series.x,
        y=series.y,
        mode="lines",
        name=label(curve.stage),
        legendgroup=f"stage {curve.stage}",
        line={"color": style.colour, "width": width, "dash": dash or style.dash},
        **described,
    )


def _heldout(curves: list[Curve], sources: Styles) -> list[go.Scatter]:
    return [
        go.Scatter(
            x=series.x,
            y=series.y,
            mode="lines+markers",
            name=label(f"{source} ({curve.stage})"),
            legendgroup=f"source {source}",
            line={"color": sources[source].colour, "width": 1.6, "dash": "dash"},
            marker={"symbol": sources[source].symbol, "size": 7},
            hovertemplate="%{fullData.name}<br>%{y:.4f} at %{x} tokens<extra></extra>",
        )
        for curve in curves
        for source, series in curve.heldout.items()
    ]
