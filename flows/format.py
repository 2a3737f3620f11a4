"""Formats numbers, results and progress as people read them in a sentence or a cell.

Invariant: nothing here knows where it is printed: a terminal, a page of Prefect, the report.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from specs.job import ProgressRow


COLOURS = {  # by action of a plan, state of a part, and outcome of a run
    **dict.fromkeys(("reuse", "finished", "stored"), "green"),
    **dict.fromkeys(("resume", "interrupted"), "yellow"),
    **dict.fromkeys(("run", "declared", "held", "not run", "running"), "cyan"),
    **dict.fromkeys(("gate failed", "failed", "gone"), "red"),
    "unknown": "dim",
}
ROUNDED_UP = 0.9995  # of a magnitude: from here on, three digits round up to the next magnitude
Unit = tuple[float, str]
MAGNITUDES: Sequence[Unit] = (
    *((1e24, "Y"), (1e21, "Z"), (1e18, "E"), (1e15, "P"), (1e12, "T")),
    *((1e9, "B"), (1e6, "M"), (1e3, "k"), (1, "")),
)
BYTES: Sequence[Unit] = (1e15, "PB"), (1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1, "B")
ENERGIES: Sequence[Unit] = (1e6, "GWh"), (1e3, "MWh"), (1, "kWh"), (1e-3, "Wh")


def is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def unit_of(value: float, units: Sequence[Unit]) -> Unit:
    """The first unit that a value, rounded to three digits, has once; else the last. Larger units first."""
    return next((unit for unit in units if value >= unit[0] * ROUNDED_UP), units[-1])


def amount(value: float | None) -> str:
    """A number with three digits and a magnitude (1,234: `1.23k`); `-` for zero, or if it is unknown."""
    if not value:
        return "-"
    magnitude, suffix = unit_of(value, MAGNITUDES)
    return f"{value / magnitude:.3g}{suffix}"


def quantity(value: float) -> str:
    """A number as in `amount`, for a sentence, where zero is written as `0`."""
    return amount(value) if value else "0"


def in_full(value: float, digits: int = 4) -> str:
    """A number in full (`25,120`), or, with a fraction, with at least `digits` significant digits."""
    if isinstance(value, float) and abs(value) < 10**digits - 0.5:
        return f"{value:,.{digits}g}"
    return f"{value:,.0f}"


def duration(seconds: float | None) -> str:
    """A duration as `83 d`, `4.2 h`, `12 min` or `30 s`; `-` if it is unknown."""
    if seconds is None:
        return "-"
    for least, unit, name in ((2 * 86400, 86400, "d"), (3600, 3600, "h"), (60, 60, "min")):
        if seconds >= least:
            return f"{seconds / unit:.3g} {name}"
    return f"{seconds:.3g} s"


def size(count: float | None) -> str:
    """A number of bytes as `57.2 GB` (10^9); `-` if it is unknown."""
    return _with_unit(count, BYTES)


def energy(kwh: float | None) -> str:
    """An energy as `3.2 GWh`; `-` if it is unknown."""
    return _with_unit(kwh, ENERGIES)


def _with_unit(value: float | None, units: Sequence[Unit]) -> str:
    if value is None:
        return "-"
    unit, name = unit_of(value, units)
    return f"{value / unit:.3g} {name}"


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
    "sources",
    "parameters",
)
SHOWN = 3


def main_numbers(metrics: dict[str, Any]) -> list[str]:
    """The numbers that say how a part turned out, the most important first: `loss 2.177`."""
    return [
        f"{name.replace('_', ' ')} {in_full(metrics[name])}"
        for name in HEADLINES
        if isinstance(metrics.get(name), (int, float))
    ]


def headline(metrics: dict[str, Any]) -> str:
    """The first of `main_numbers`, and what a part rejected or set aside."""
    facts = [*main_numbers(metrics)[:SHOWN], *_rejected(metrics.get("rejected"))]
    if state := metrics.get("set_aside"):  # of an imported tokenizer
        facts.append(f"{' and '.join(state)} set aside")
    return ", ".join(facts)


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
