"""Detects steps with an anomalous loss or gradient norm: those that are not taken, for which
`specs.anomalies` states the policy, and those that are only reported.

**Reports.** A value x of an accepted step is reported when

    |ln x - m| > report_threshold * max(1.4826 * median |ln w - m|, LEAST_DEVIATION),  m = median ln w,

w being the positive ones of the last `REPORT_WINDOW` accepted values, at least `REPORT_LEAST`; a loss only
when it is above. Both quantities vary in proportion to their size, hence the logarithm. The medians follow
the noise of the run; spikes hardly move them. While the window has a reported value, only a more extreme
one is reported, so a level that stays is reported once.

With the default of 10, one of 2,687 steps of undisturbed miniatures (pre-training to DPO) was reported: a
gradient norm of ten times the median; with 8, there would have been seven. Of gradient norms multiplied by
3.4, 10 and 100 there, 28%, 65% and 94% are seen; where the norm varies by a tenth, the bound is e times the
median. A norm of weights or optimizer states (`trainer.optimizer.norms`) is reported when it is not finite.

Invariant: a decision is a function of the policy, the step, its loss and gradient norm, and
`AnomalyDetector.state`. Every checkpoint has that state, so a resumed run decides the same.
"""

import math
import statistics
from collections import deque
from collections.abc import Mapping
from dataclasses import asdict
from typing import TypedDict

from specs.anomalies import Action, Anomalies, Event, Quantity, StoredEvent
from specs.errors import StageError


class AnomalyError(StageError):
    """A loss or gradient norm at which the policy stops training. Another attempt would meet it again."""


REPORT_WINDOW = 128
REPORT_LEAST = 20
LEAST_DEVIATION = 0.01  # a percent


class AnomalyState(TypedDict, total=False):
    """The state of the detector, as a checkpoint stores it."""

    events: list[StoredEvent]  # all events of the segment so far
    loss: list[float]  # of the last accepted steps
    grad_norm: list[float]  # of the last accepted steps


class AnomalyDetector:
    """The detector for the steps of a segment that begins after step `begin`. `state` comes from the
    checkpoint that training resumes from."""

    def __init__(self, policy: Anomalies, begin: int, state: AnomalyState | None = None) -> None:
        self.policy = policy
        self.begin = begin
        state = state or {}
        self.events = list(state.get("events", []))
        accepted = {"loss": state.get("loss", []), "grad_norm": state.get("grad_norm", [])}
        window = max(policy.window, REPORT_WINDOW)
        self._accepted = {name: deque(values, window) for name, values in accepted.items()}

    def check(self, step: int, loss: float, grad_norm: float) -> Event | None:
        """The anomaly of a step; None when there is none. A step whose anomaly is only reported is taken.
        `loss`: of the whole step, in nats; `grad_norm`: of the whole gradient, before clipping."""
        measured: dict[Quantity, float] = {"loss": loss, "grad_norm": grad_norm}
        for quantity, value in measured.items():
            if not math.isfinite(value):
                return self._event(step, quantity, measured, None, self.policy.nonfinite)
        if self.policy.spike != "ignore":
            for quantity, value in measured.items():
                if value > (bound := self._limit(quantity)):
                    return self._event(step, quantity, measured, bound, self.policy.spike)
        limits = {name: self._report_limit(step, name, value) for name, value in measured.items()}
        for quantity, value in measured.items():
            self._accepted[quantity].append(value)
        for quantity, limit in limits.items():
            if limit is not None:
                return self._event(step, quantity, measured, limit, "report")
        return None

    def check_norms(self, step: int, norms: Mapping[str, float]) -> list[Event]:
        """Reports of the norms (`trainer.optimizer`) that are not finite, each reported once in a segment."""
        known = {event["quantity"] for event in self.events}
        names = [f"norm of {name}" for name, norm in norms.items() if not math.isfinite(norm)]
        return [self._event(step, name, {}, None, "report") for name in names if name not in known]

    def _limit(self, quantity: Quantity) -> float:
        """mean + spike_threshold x standard deviation of the window, when it is full."""
        values = list(self._accepted[quantity])[-self.policy.window :]
        if len(values) < self.policy.window:
            return math.inf
        mean = statistics.fmean(values)
        return mean + self.policy.spike_threshold * statistics.pstdev(values, mean)

    def _report_limit(self, step: int, quantity: Quantity, value: float) -> float | None:
        """The bound beyond which a value is, so that it is reported; None when it is not. See above."""
        values = list(self._accepted[quantity])[-REPORT_WINDOW:]
        logarithms = [math.log(other) for other in values if other > 0]
        if self.policy.report_threshold is None or len(logarithms) < REPORT_LEAST:
            return None
        median = statistics.median(logarithms)
        deviation = 1.4826 * statistics.median(abs(other - median) for other in logarithms)
        reach = self.policy.report_threshold * max(deviation, LEAST_DEVIATION)
        distance = math.log(value) - median if value > 0 else -math.inf
        if abs(distance) <= reach or (distance < 0 and quantity == "loss"):
            return None
        reported = [
            event[quantity]
            for event in self.events
            if (event["action"], event["quantity"]) == ("report", quantity)
            and event["step"] >= step - REPORT_WINDOW
        ]
        if any(other >= value if distance > 0 else other <= value for other in reported):
            return None
        return math.exp(median + math.copysign(reach, distance))

    def _event(
        self,
        step: int,
        quantity: str,
        measured: Mapping[Quantity, float],
        limit: float | None,
        action: Action,
    ) -> Event:
        back = self.policy.rollback_step(step, self.begin) if action == "rollback" else None
        if action == "rollback" and back is None:
            action = "skip"
        if action != "report" and self._not_taken >= self.policy.max_events:
            action, back = "stop", None
        finite = {name: value for name, value in measured.items() if math.isfinite(value)}
        event = Event(step, quantity, finite.get("loss"), finite.get("grad_norm"), limit, action, back)
        self.events.append(asdict(event))
        return event

    @property
    def _not_taken(self) -> int:
        """Number of steps that were skipped or rolled back. A step that stopped an attempt does not count,
        since the next attempt repeated it."""
        return sum(event["action"] in ("skip", "rollback") for event in self.events)

    def error(self, event: Event) -> AnomalyError:
        """The error that ends training."""
        field = "nonfinite" if event.limit is None else "spike"
        if getattr(self.policy, field) == "stop":
            fix = f"; lower the learning rate, or set anomalies.{field}: skip or rollback"
        else:
            fix = (
                f"; {self._not_taken} steps of this segment were skipped or rolled back before, and"
                " anomalies.max_events allows no more"
            )
        return AnomalyError(event.text + fix)

    def state(self) -> AnomalyState:
        """The state to store in a checkpoint: the events so far, and what later values are compared with."""
        loss, grad_norm = map(list, self._accepted.values())
        return {"events": list(self.events), "loss": loss, "grad_norm": grad_norm}
