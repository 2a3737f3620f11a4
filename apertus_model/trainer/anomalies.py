"""Which steps are not taken, and what is done instead. `specs.anomalies` states the policy.

Invariant: a decision is a function of the policy, the step, its loss and gradient norm, and the state that `facts` returns. That state goes
into every checkpoint, so a run that was interrupted decides alike.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from dataclasses import asdict, dataclass
from typing import Any

from specs.anomalies import Anomalies
from specs.errors import StageError


class AnomalyError(StageError):
    """A loss or gradient norm at which the policy says to stop: another attempt would meet it again."""


@dataclass(frozen=True)
class Event:
    """A step that was not taken. `loss` and `grad_norm` are None where they were not finite; `limit` is what a value that spiked was
    allowed to be; `to` the step whose weights and optimizer state came back."""

    step: int
    quantity: str
    loss: float | None
    grad_norm: float | None
    limit: float | None
    action: str
    to: int | None = None

    @property
    def text(self) -> str:
        value = self.loss if self.quantity == "loss" else self.grad_norm
        name = self.quantity.replace("_", " ")
        told = f"the {name} is not finite" if self.limit is None else f"the {name} of {value:.4g} spikes above {self.limit:.4g}"
        done = {"skip": "the step is skipped", "rollback": f"weights and optimizer go back to step {self.to}", "stop": "training stops"}
        return f"step {self.step}: {told}; {done[self.action]}"


class Guard:
    """Judges the steps of a segment that begins after step `begin`. `state`: the facts of the checkpoint that is resumed from."""

    def __init__(self, policy: Anomalies, begin: int, state: dict[str, Any] | None = None) -> None:
        self.policy = policy
        self.begin = begin
        state = state or {}
        self.events: list[dict[str, Any]] = list(state.get("events", []))
        self._values = {name: deque[float](state.get(name, []), policy.window) for name in ("loss", "grad_norm")}

    def judge(self, step: int, loss: float, grad_norm: float) -> Event | None:
        """None for a step that is taken.

        Args:
            loss: of the whole step, in nats.
            grad_norm: of the whole gradient, before clipping.
        """
        found = {"loss": loss, "grad_norm": grad_norm}
        for quantity, value in found.items():
            if not math.isfinite(value):
                return self._event(step, quantity, found, None, self.policy.nonfinite)
        if self.policy.spike == "ignore":
            return None
        for quantity, value in found.items():
            if (limit := self._limit(quantity)) is not None and value > limit:
                return self._event(step, quantity, found, limit, self.policy.spike)
        for quantity, value in found.items():
            self._values[quantity].append(value)
        return None

    def _limit(self, quantity: str) -> float | None:
        """mean + spike_threshold x standard deviation of the window, when it is full."""
        values = self._values[quantity]
        if len(values) < self.policy.window:
            return None
        mean = statistics.fmean(values)
        return mean + self.policy.spike_threshold * statistics.pstdev(values, mean)

    def _event(self, step: int, quantity: str, found: dict[str, float], limit: float | None, action: str) -> Event:
        back = self.policy.rollback_step(step, self.begin) if action == "rollback" else None
        if action == "rollback" and back is None:
            action = "skip"
        if self._passed_over >= self.policy.max_events:
            action, back = "stop", None
        finite = {name: value if math.isfinite(value) else None for name, value in found.items()}
        event = Event(step, quantity, finite["loss"], finite["grad_norm"], limit, action, back)
        self.events.append(asdict(event))
        return event

    @property
    def _passed_over(self) -> int:
        """Steps that were not taken and did not end an attempt: one that did was done again."""
        return sum(event["action"] != "stop" for event in self.events)

    def stop(self, event: Event) -> AnomalyError:
        """The error to end with."""
        if self._passed_over >= max(1, self.policy.max_events):
            told = f"; {self._passed_over} steps of this segment were passed over before, anomalies.max_events allows no more"
        else:
            field = "nonfinite" if event.limit is None else "spike"
            told = f"; lower the learning rate, or let such steps be passed over (anomalies.{field}: skip or rollback)"
        return AnomalyError(event.text + told)

    def facts(self) -> dict[str, Any]:
        """What a checkpoint says of it: the events so far, and the values that the next ones are compared with. Empty without either."""
        state: dict[str, Any] = {"events": list(self.events)} if self.events else {}
        return state | {name: list(values) for name, values in self._values.items() if values}
