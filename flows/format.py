"""Formats numbers, results and progress as people read them in a sentence or a cell.

Invariant: nothing here knows where it is printed: a terminal, a page of Prefect, the report.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from specs.job import ProgressRow


NAMED = 6  # names in a sentence
COLOURS = {"reuse": "green", "resume": "yellow", "run": "cyan"}  # by action of a plan
ROUNDED_UP = 0.9995  # of a magnitude: from here on, three digits round up to the next magnitude


def is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def amount(value: float) -> str:
    """A number with three digits and a magnitude, such as `1.23k` for 1,234; `-` for zero."""
    if not value:
        return "-"
    for limit, suffix in (
        (1e24, "Y"),
        (1e21, "Z"),
        (1e18, "E"),
        (1e15, "P"),
        (1e12, "T"),
        (1e9, "B"),
        (1e6, "M"),
        (1e3, "k"),
    ):
        if value >= limit * ROUNDED_UP:
            return f"{value / limit:.3g}{suffix}"
    return f"{value:.3g}"


def quantity(value: float) -> str:
    """A number as in `amount`, for a sentence, where zero is written as `0`."""
    return amount(value) if value else "0"


def in_full(value: float, digits: int = 4) -> str:
    """A number as a person writes it: a count in full (`25,120`), a fraction with `digits` significant
    digits, but with all digits before the point."""
    if isinstance(value, float) and abs(value) < 10**digits - 0.5:
        return f"{value:,.{digits}g}"
    return f"{value:,.0f}"


def some_of(names: Sequence[str]) -> str:
    """The first `NAMED` names, and how many more there are."""
    more = f" and {len(names) - NAMED:,} more" if len(names) > NAMED else ""
    return ", ".join(names[:NAMED]) + more


def flop(value: float) -> str:
    """A number of floating-point operations as papers write it: `6.74e24`; `-` for zero."""
    return f"{value:.3g}".replace("e+", "e") if value else "-"


HEADLINES = (
    "loss",
    "validation_loss",
    "perplexity",
    "accuracy",
    "calibration_error",
    "documents",
    "conversations",
    "vocab_size",
    "logit_difference",
    "reward/mean",
    "reward/difference",
    "mean_offline",
    "mean_sampled",
    "pairs",
    "prompts",
    "completions",
    "sequences",
    "lines",
    "languages",
)
SHOWN = 3


def headline(metrics: dict[str, Any]) -> str:
    """The few numbers that say how a part turned out, and what it rejected or set aside."""
    found = [
        f"{name.replace('_', ' ')} {in_full(metrics[name])}"
        for name in HEADLINES
        if isinstance(metrics.get(name), (int, float))
    ]
    found = [*found[:SHOWN], *_rejected(metrics.get("rejected"))]
    if state := metrics.get("set_aside"):  # of an imported tokenizer
        found.append(f"{' and '.join(state)} set aside")
    return ", ".join(found)


def _rejected(counts: Any) -> list[str]:
    """The documents that a part could not use, by reason, such as `12 rejected (10 empty, 2 not_utf8)`."""
    if not isinstance(counts, dict) or not (total := sum(counts.values())):
        return []
    reasons = sorted((name for name in counts if counts[name]), key=lambda name: (-counts[name], name))
    return [f"{total:,} rejected ({', '.join(f'{counts[name]:,} {name}' for name in reasons)})"]


def describe(row: ProgressRow) -> str:
    """A line about progress, such as `step 120/400  9.1k tokens/s  loss 3.214`."""
    metrics = dict(row.metrics)
    text = f"{row.unit} {row.done:g}/{row.total:g}"
    if (speed := metrics.pop("tokens_per_second", None)) is not None:
        text += f"  {amount(speed)} tokens/s"
    for name in ("loss", "validation_loss"):
        if (value := metrics.pop(name, None)) is not None:
            text += f"  {name.replace('_', ' ')} {value:.3f}"
    if (queued := metrics.pop("queued", None)) is not None:
        text += f"  {metrics.pop('running'):g} running, {queued:g} queued"
    return text
