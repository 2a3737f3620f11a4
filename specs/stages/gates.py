"""The base classes of stages that measure: gates on their metrics, and published scores beside them.

Invariant: neither affects the metrics, so editing them reruns nothing.
"""

from collections.abc import Iterator

from specs.base import Spec, execution
from specs.errors import did_you_mean
from specs.published import PublishedScore
from specs.stages.base import Stage


class Gate(Spec):
    """A bound on a metric. A gate that is not met stops the stages after this one. The metrics stay stored,
    so editing a bound reruns nothing."""

    metric: str = execution(
        description="name of the metric, for example perplexity, perplexity/corpus/code,"
        " memorisation/greedy/prefix-50/offset-0/exact/16"
    )
    max: float | None = execution(None)
    min: float | None = execution(None)

    def conflicts(self) -> Iterator[str]:
        if self.max is None and self.min is None:
            yield "a gate needs max or min"
        if self.max is not None and self.min is not None and self.min > self.max:
            yield f"no value is at least {self.min:g} and at most {self.max:g}; set a min below max"

    def failure(self, metrics: dict[str, float]) -> str | None:
        """Why the gate is not met; None if it is met."""
        if self.metric not in metrics:
            return f"gate on {self.metric}: there is no such metric; {did_you_mean(self.metric, metrics)}"
        value = metrics[self.metric]
        if self.max is not None and not value <= self.max:
            return f"gate on {self.metric}: {value:.6g} is above the allowed {self.max:g}"
        if self.min is not None and not value >= self.min:
            return f"gate on {self.metric}: {value:.6g} is below the required {self.min:g}"
        return None


class Gated(Stage):
    """A stage whose last part has metrics."""

    gates: list[Gate] = execution(default_factory=list)


class Measuring(Gated):
    """A stage whose metrics can have published values."""

    reference: dict[str, PublishedScore] = execution(
        default_factory=dict,
        description="published scores by metric, which the report and `apertus diff` show beside ours",
    )

    def published_scores(self) -> dict[str, PublishedScore]:
        return self.reference
