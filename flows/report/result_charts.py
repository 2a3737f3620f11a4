"""Charts of evaluations: perplexity, memorisation, loss by position, forgetting, rewards, pairs.

Invariant: an evaluation has the colour of the stage whose checkpoint it measured, unless another has it.
"""

from collections.abc import Iterable
from dataclasses import replace

import plotly.graph_objects as go

from flows.format import amount, in_full
from flows.report.figures import (
    NEUTRAL,
    Entry,
    Figure,
    Style,
    Styles,
    axis_title,
    label,
    plot,
    row_axis,
    rows_plot,
    short,
    whiskers,
)
from flows.report.memorisation import MEASURES, Memorised, Over
from flows.report.results import Evaluation, Rewards

HEIGHT = 280
BINS = 24
CROWDED = 12  # more bars than this need the whole width


def styles(evaluations: list[Evaluation], stages: Styles) -> dict[str, Style]:
    measured = {evaluation.of for evaluation in evaluations}
    free = [style for stage, style in stages.items() if stage not in measured]
    look: dict[str, Style] = {}
    for evaluation in evaluations:
        style = stages.get(evaluation.of)
        if style is None or style in look.values():
            style = free.pop(0) if free else style or Style(NEUTRAL)
        look[evaluation.name] = style
    return look


def results(evaluations: list[Evaluation], look: dict[str, Style]) -> list[Figure]:
    """All charts that have numbers to show."""
    perplexity = {evaluation.name: evaluation.family("perplexity/") for evaluation in evaluations}
    folder = _folder(name for by_source in perplexity.values() for name in by_source)
    for evaluation in evaluations:
        if "perplexity" in evaluation.metrics:
            perplexity[evaluation.name][f"{folder}all"] = evaluation.metrics["perplexity"]
    figures = [_bars("Perplexity on held-out text", "By source; lower is better.", perplexity, look)]
    figures += _memorisation(evaluations, look)
    position = {evaluation.name: evaluation.at_numbers("loss/position/") for evaluation in evaluations}
    summary = "Nats per token, from each position in a document to the next."
    figures.append(_by_number("Loss by position", summary, position, look, {}))
    forgetting = {evaluation.name: evaluation.family("forgetting/") for evaluation in evaluations}
    figures.append(_bars("Forgetting", "Rise of the loss in nats per token, by source.", forgetting, look))
    return [figure for figure in figures if figure is not None]


OVER: dict[Over, str] = {
    "repetitions": "By repetitions in the training data (0: never seen), with the shortest prefix.",
    "prefix": "By length of the prefix, with the most repetitions.",
    "offset": "By tokens before the shortest prefix, with the most repetitions.",
}


def _memorisation(evaluations: list[Evaluation], look: dict[str, Style]) -> list[Figure | None]:
    """A line per evaluation and decoding: each measure over repetitions, Rouge-L also over the others."""
    tables = {evaluation.name: Memorised.of(evaluation.metrics) for evaluation in evaluations}
    decodings = [row.decoding for table in tables.values() for row in table.rows]
    dashes = dict(zip(dict.fromkeys(decodings), ("solid", "dash", "dot"), strict=False))
    figures = []
    for over, summary in OVER.items():
        for measure, meaning in MEASURES.items():
            if measure == "sequences" or (over != "repetitions" and measure != "rouge_l"):
                continue
            values, styles = dict[str, dict[int, float]](), dict[str, Style]()
            for name, table in tables.items():
                for decoding, line in table.lines(measure, over).items():
                    values[f"{name}, {decoding}"] = line
                    styles[f"{name}, {decoding}"] = replace(look[name], dash=dashes[decoding])
            axis: dict[str, object] = {"range": [-0.04, 1.04], "tickformat": ".0%"}
            figures.append(_by_number(f"Memorisation: {meaning}", summary, values, styles, axis))
    return figures


def _folder(names: Iterable[str]) -> str:
    """The prefix that the names share up to their last slash."""
    folders = {name[: name.rfind("/") + 1] for name in names}
    return folders.pop() if len(folders) == 1 else ""


def _entries(
    values: dict[str, dict[str, float]] | dict[str, dict[int, float]], look: dict[str, Style]
) -> list[Entry]:
    return [Entry(name, f"evaluation {name}", look[name]) for name, numbers in values.items() if numbers]


def _bars(
    title: str, summary: str, values: dict[str, dict[str, float]], look: dict[str, Style]
) -> Figure | None:
    """A group of bars for each category, a bar for each evaluation."""
    names = short(category for numbers in values.values() for category in numbers)
    traces = [
        go.Bar(
            x=[label(names[category]) for category in numbers],
            y=list(numbers.values()),
            name=label(name),
            legendgroup=f"evaluation {name}",
            marker={"color": look[name].colour},
            text=[in_full(value, 3) for value in numbers.values()],
            textposition="outside",
            textangle=0,
            cliponaxis=False,
            hovertemplate="%{fullData.name}<br>%{x}: %{y:.4g}<extra></extra>",
        )
        for name, numbers in values.items()
        if numbers
    ]
    if not traces:
        return None
    category = {"type": "category", "automargin": True}
    drawn = plot(traces, barmode="group", bargap=0.25, xaxis=category, yaxis={"nticks": 6})
    wide = sum(map(len, values.values())) > CROWDED
    return Figure(title, summary, HEIGHT, drawn, _entries(values, look), wide=wide)


def _by_number(
    title: str,
    summary: str,
    values: dict[str, dict[int, float]],
    look: dict[str, Style],
    axis: dict[str, object],
) -> Figure | None:
    """A line for each evaluation over evenly spaced numbers that grow by factors."""
    categories = sorted({number for line in values.values() for number in line})
    if not categories:
        return None
    traces = [
        go.Scatter(
            x=[f"{number:,}" for number in line],
            y=list(line.values()),
            mode="lines+markers",
            name=label(name),
            legendgroup=f"evaluation {name}",
            line={"color": look[name].colour, "width": 2.2, "dash": look[name].dash},
            marker={"symbol": look[name].symbol, "size": 8},
            cliponaxis=False,
            hovertemplate="%{fullData.name}<br>%{x}: %{y:.4g}<extra></extra>",
        )
        for name, line in values.items()
        if line
    ]
    numbers = [f"{number:,}" for number in categories]
    order = {"type": "category", "categoryorder": "array", "categoryarray": numbers}
    drawn = plot(traces, xaxis=order, yaxis={"nticks": 6} | axis)
    return Figure(title, summary, HEIGHT, drawn, _entries(values, look))


def rewards(name: str, measured: Rewards, style: Style, stages: Styles) -> Figure:
    """The distribution of the rewards of the prompts, before and after; `style` is the evaluation's."""
    everything = measured.values + measured.before
    low, high = min(everything), max(everything)
    width = (high - low) / BINS or 1.0
    centres = [low + (index + 0.5) * width for index in range(BINS)]
    before = stages.get(measured.against, Style(NEUTRAL))
    before = Style(NEUTRAL) if before.colour == style.colour else before
    groups = [
        (measured.against, "before", measured.before, before),
        (measured.model, "after", measured.values, style),
    ]
    traces = [
        go.Bar(
            x=[float(f"{centre:.5g}") for centre in centres],
            y=_shares(values, low, width),
            width=width,
            name=label(model),
            legendgroup=f"reward {role}",
            opacity=0.65,
            marker={"color": look.colour, "line": {"width": 0}},
            hovertemplate="%{fullData.name}<br>%{y:.1%} around %{x:.3g}<extra></extra>",
        )
        for model, role, values, look in groups
        if values
    ]
    title = axis_title("mean reward of a prompt")
    drawn = plot(
        traces, barmode="overlay", bargap=0, xaxis={"title": title}, yaxis={"tickformat": ".0%", "nticks": 6}
    )
    legend = [Entry(model, f"reward {role}", look) for model, role, values, look in groups if values]
    summary = f"Share of the prompts, by reward; {len(measured.values):,} prompts."
    return Figure(f"Rewards: {name}", summary, HEIGHT, drawn, legend)


def _shares(values: list[float], low: float, width: float) -> list[float]:
    counts = [0] * BINS
    for value in values:
        counts[min(BINS - 1, int((value - low) / width))] += 1
    return [round(count / len(values), 5) for count in counts]


def differences(evaluations: list[Evaluation], look: dict[str, Style]) -> Figure | None:
    """Mean differences of rewards with their confidence intervals, beside zero."""
    shown = [evaluation for evaluation in evaluations if "reward/difference" in evaluation.metrics]
    if not shown:
        return None
    traces = []
    for evaluation in shown:
        middle = evaluation.metrics["reward/difference"]
        low, high = (evaluation.metrics.get(f"reward/difference/{end}", middle) for end in ("low", "high"))
        style = look[evaluation.name]
        traces.append(
            go.Scatter(
                x=[middle],
                y=[label(evaluation.name)],
                mode="markers",
                name=label(evaluation.name),
                marker={"color": style.colour, "size": 11, "symbol": style.symbol},
                error_x=whiskers([(middle, low, high)], style.colour, 6),
                hovertemplate=f"%{{y}}<br>%{{x:.4g}} [{low:.4g}, {high:.4g}]<extra></extra>",
            )
        )
    crossing = {"zeroline": True, "rangemode": "tozero"}
    drawn = rows_plot(traces, 34, xaxis=crossing, yaxis=row_axis(len(shown)))
    summary = "Mean over the prompts of after minus before, with its confidence interval."
    return Figure("Difference of rewards", summary, 70 + 44 * len(shown), drawn)


def quantiles(name: str, counts: list[float], without: dict[str, float]) -> Figure:
    """The histogram of the quantiles of completions. `without`: prompts without a pair, by reason."""
    count = len(counts)
    traces = [
        go.Bar(
            x=[(index + 0.5) / count for index in range(count)],
            y=counts,
            width=1 / count,
            marker={"color": NEUTRAL, "line": {"width": 1, "color": "rgba(127,127,127,.5)"}},
            hovertemplate="%{y} around quantile %{x:.3f}<extra></extra>",
        )
    ]
    title = axis_title("quantile of the reward")
    drawn = plot(traces, bargap=0, xaxis={"range": [0, 1], "title": title}, yaxis={"nticks": 6})
    summary = "Number of completions, by the quantile of their reward."
    if without:
        reasons = (f"{amount(number)} for {reason.replace('_', ' ')}" for reason, number in without.items())
        summary += f" Prompts without a pair: {', '.join(reasons)}."
    return Figure(f"Quantiles: {name}", summary, HEIGHT, drawn)
