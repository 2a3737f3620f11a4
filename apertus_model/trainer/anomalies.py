"""Detects steps with an anomalous loss or gradient norm, which are not taken. `specs.anomalies` states the
policy.

Invariant: a decision is a function of the policy, the step, its loss and gradient norm, and
`AnomalyDetector.state`. Every checkpoint has that state, so that a run decides the same after an
interruption.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal, TypedDict

from specs.anomalies import Anomalies
from specs.errors import StageError


class AnomalyError(StageError):
    """A loss or gradient norm at which the policy stops training. Another attempt would meet it again."""


Quantity = Literal["loss", "grad_norm"]
Action = Literal["stop", "skip", "rollback"]


@dataclass(frozen=True)
class Event:
    """A step that was not taken."""

    step: int
    quantity: Quantity  # which of the two was anomalous
    loss: float | None  # None: it was not finite
    grad_norm: float | None  # None: it was not finite
    limit: float | None  # the limit that the value exceeded; None: the value was not finite
    action: Action
    to: int | None = None  # the step whose weights and optimizer state a rollback restored

    @property
    def text(self) -> str:
        value = self.loss if self.quantity == "loss" else self.grad_norm
        name = self.quantity.replace("_", " ")
        found = (
            f"the {name} is not finite"
            if self.limit is None
            else f"the {name} of {value:.4g} spikes above {self.limit:.4g}"
        )
        consequence = {
            "skip": "the step is skipped",
            "rollback": f"weights and optimizer go back to step {self.to}",
            "stop": "training stops",
        }
        return f"step {self.step}: {found}; {consequence[self.action]}"


StoredEvent = dict[str, Any]
"""The fields of an `Event`."""


class AnomalyState(TypedDict, total=False):
    """The state of the detector, as a checkpoint stores it. Empty lists are left out."""

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
        self._accepted = {name: deque(values, policy.window) for name, values in accepted.items()}

    def check(self, step: int, loss: float, grad_norm: float) -> Event | None:
        """The anomaly because of which a step must not be taken; None when it may be taken.

        Args:
            step: number of the step.
            loss: of the whole step, in nats.
            grad_norm: of the whole gradient, before clipping.
        """
        measured: dict[Quantity, float] = {"loss": loss, "grad_norm": grad_norm}
        for quantity, value in measured.items():
            if not math.isfinite(value):
                return self._event(step, quantity, measured, None, self.policy.nonfinite)
        if self.policy.spike == "ignore":
            return None
        for quantity, value in measured.items():
            if (limit := self._limit(quantity)) is not None and value > limit:
                return self._event(step, quantity, measured, limit, self.policy.spike)
        for quantity, value in measured.items():
            self._accepted[quantity].append(value)
        return None

    def _limit(self, quantity: str) -> float | None:
        """mean + spike_threshold x standard deviation of the window, when it is full."""
        values = self._accepted[quantity]
        if len(values) < self.policy.window:
            return None
        mean = statistics.fmean(values)
        return mean + self.policy.spike_threshold * statistics.pstdev(values, mean)

    def _event(
        self,
        step: int,
        quantity: Quantity,
        measured: Mapping[Quantity, float],
        limit: float | None,
        action: Action,
    ) -> Event:
        back = self.policy.rollback_step(step, self.begin) if action == "rollback" else None
        if action == "rollback" and back is None:
            action = "skip"
        if self._not_taken >= self.policy.max_events:
            action, back = "stop", None
        finite = {name: value if math.isfinite(value) else None for name, value in measured.items()}
        event = Event(step, quantity, finite["loss"], finite["grad_norm"], limit, action, back)
        self.events.append(asdict(event))
        return event

    @property
    def _not_taken(self) -> int:
        """Number of steps that were skipped or rolled back. A step that stopped an attempt does not count,
        since the next attempt repeated it."""
        return sum(event["action"] != "stop" for event in self.events)

    def error(self, event: Event) -> AnomalyError:
        """The error that ends training."""
        if self._not_taken >= max(1, self.policy.max_events):
            fix = (
                f"; {self._not_taken} steps of this segment were skipped or rolled back before, and"
                " anomalies.max_events allows no more"
            )
        else:
            field = "nonfinite" if event.limit is None else "spike"
            fix = f"; lower the learning rate, or set anomalies.{field}: skip or rollback"
        return AnomalyError(event.text + fix)

    def state(self) -> AnomalyState:
        """The state to store in a checkpoint: the events so far, and the values that later ones are compared
        with."""
        state: AnomalyState = {"events": list(self.events)} if self.events else {}
        if loss := self._accepted["loss"]:
            state["loss"] = list(loss)
        if grad_norm := self._accepted["grad_norm"]:
            state["grad_norm"] = list(grad_norm)
        return state
