"""The published scores in a recipe, and the comparison of ours with them.

Invariant: a score enters no fingerprint; it is compared with stored metrics, in their unit.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from specs.base import Spec, execution

HALF_WIDTH = 1.959964  # of a 95% interval, in standard errors of a normal distribution


class PublishedScore(Spec):
    """The value that a publication states for a metric."""

    value: float = execution()
    unit: Literal["percent", "metric"] = execution(
        description="percent: of a metric that we store as a fraction, 61.6 for 0.616; metric: as we store it"
    )
    source: str = execution(min_length=1, description="publication and table, for people")
    stderr: float | None = execution(None, ge=0, description="standard error of the score, in the same unit")

    def conflicts(self) -> Iterator[str]:
        if self.unit == "percent" and not 0 <= self.value <= 100:
            yield f"{self.value:g} is no percentage; set a value from 0 to 100, or unit: metric"

    def compared(self, metric: str, metrics: Mapping[str, float]) -> Compared:
        """Compares our score, if `metrics` has it, with this one."""
        scale = 0.01 if self.unit == "percent" else 1.0
        published = self.value * scale
        published_stderr = None if self.stderr is None else self.stderr * scale
        own, own_stderr = metrics.get(metric), standard_error(metric, metrics)
        difference = None if own is None else own - published
        if own_stderr is None or difference is None:
            return Compared(metric, own, published, difference, None, "unknown", self.source)
        if published_stderr is None:
            return Compared(metric, own, published, difference, own_stderr, "ours alone", self.source)
        both = math.hypot(own_stderr, published_stderr)
        return Compared(metric, own, published, difference, both, "both", self.source)


@dataclass(frozen=True)
class Compared:
    """A metric beside its published score, both in the unit of the metric."""

    metric: str
    ours: float | None  # None where nothing was measured
    published: float
    difference: float | None  # ours - published
    stderr: float | None  # of the difference
    # what `stderr` includes: sqrt(ours^2 + published^2) if the publication states its own, else ours
    stderr_of: Literal["both", "ours alone", "unknown"]
    source: str


def standard_error(metric: str, metrics: Mapping[str, float]) -> float | None:
    """The standard error of a metric: `<metric>_stderr` (for a metric of tasks with a filter,
    `<metric>_stderr/<filter>`), else computed from its 95% interval, `<metric>/low` to `<metric>/high`; None
    if there is neither."""
    head, _, last = metric.rpartition("/")
    for name in (f"{metric}_stderr", f"{head}_stderr/{last}"):
        if name in metrics:
            return metrics[name]
    low, high = metrics.get(f"{metric}/low"), metrics.get(f"{metric}/high")
    return None if low is None or high is None else (high - low) / (2 * HALF_WIDTH)
