"""The reaction of training to a NaN, infinite or spiking loss or gradient. It is part of a stage's identity,
since it changes the result. Reports change no result, and are not part of it.

Invariant: the reaction at a step is a function of this spec, of the losses and gradient norms before it, and
of the step. It depends neither on when checkpoints were committed nor on interruptions.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from specs.base import Spec, execution, option
from specs.errors import counted, some_of

Quantity = Literal["loss", "grad_norm"]
Action = Literal["stop", "skip", "rollback", "report"]
SHOWN = 3  # events in a remark


class Anomalies(Spec):
    """The reaction to a NaN, infinite or spiking loss or gradient norm (before clipping).

    `stop` ends the stage with an error, without another attempt. `skip` leaves weights and moments as they
    are and continues with the next step and batch. `rollback` restores weights and moments from a checkpoint
    of this segment and continues with the next step and batch, so the samples since the checkpoint are not
    trained on again; without a checkpoint of the segment it skips.

    A value spikes when it exceeds mean + spike_threshold x standard deviation of its last `window` accepted
    values, once there are that many: the rule of OLMo-core's SkipStepOptimizer.

    Whatever the policy, an unusual value of an accepted step is reported (`apertus_model.trainer.anomalies`
    has the bound)."""

    nonfinite: Literal["stop", "skip", "rollback"] = option(
        "stop", description="what to do at a NaN or an infinity"
    )
    spike: Literal["ignore", "stop", "skip", "rollback"] = option("ignore")
    spike_threshold: float = option(
        6.0, gt=0, description="how far above the mean a value spikes, in standard deviations"
    )
    window: int = option(128, ge=2, description="accepted steps that a value is compared with")
    rollback_interval: int = option(
        100,
        ge=1,
        description="a rollback goes to a multiple of this many steps of the stage; a checkpoint is made at "
        "each and kept as long as needed",
    )
    rollback_margin: int = option(100, ge=1, description="minimum number of steps that a rollback goes back")
    max_events: int = execution(
        10,
        ge=0,
        description="anomalies of a segment that are skipped or rolled back; the stage stops at the next one",
    )
    report_threshold: float | None = execution(
        10.0,
        gt=0,
        description="how far above the median of the last steps a value is reported, in robust standard"
        " deviations; null: never",
    )

    @property
    def rolls_back(self) -> bool:
        return "rollback" in (self.nonfinite, self.spike)

    @property
    def skips(self) -> bool:
        """Whether a step can be skipped, including when a rollback has no checkpoint."""
        return {"skip", "rollback"} & {self.nonfinite, self.spike} != set()

    def rollback_from(self, step: int, begin: int) -> float:
        """The earliest step that a rollback after `step` may go to, in a segment that begins after `begin`.
        Checkpoints from there on are kept."""
        if not self.rolls_back:
            return float("inf")
        back = self.rollback_step(step + 1, begin)
        return float("-inf") if back is None else back

    def rollback_step(self, step: int, begin: int) -> int | None:
        """The step to which an anomaly at `step` rolls back, in a segment that begins after `begin`; None if
        there is no such step yet."""
        target = (step - self.rollback_margin) // self.rollback_interval * self.rollback_interval
        return target if target > begin else None


@dataclass(frozen=True)
class Event:
    """A step that was not taken, or that was reported."""

    step: int
    quantity: str  # what was anomalous: a `Quantity`, or a norm of weights or optimizer states
    loss: float | None  # None: it was not finite, or a norm was anomalous
    grad_norm: float | None  # likewise
    limit: float | None  # the limit beyond which the value was; None: it was not finite
    action: Action
    to: int | None = None  # the step whose weights and optimizer state a rollback restored

    @property
    def text(self) -> str:
        value = self.loss if self.quantity == "loss" else self.grad_norm
        what = f"the {self.quantity.replace('grad_norm', 'grad norm')}"
        if self.limit is None or value is None:
            what += " is not finite"
        else:
            verb = "spikes above" if value > self.limit else "falls below"
            what += f" of {value:.4g} {verb} {self.limit:.4g}"
        consequence = {
            "skip": "the step is skipped",
            "rollback": f"weights and optimizer go back to step {self.to}",
            "stop": "training stops",
            "report": "training continues",
        }
        return f"step {self.step}: {what}; {consequence[self.action]}"


StoredEvent = dict[str, Any]
"""The fields of an `Event`."""


def remark(facts: Mapping[str, Any]) -> str:
    """A remark about the events among the facts of a part of training, or of its checkpoint; empty if there
    are none."""
    stored = facts.get("anomalies", [])
    events: list[StoredEvent] = stored.get("events", []) if isinstance(stored, dict) else stored
    texts = [Event(**event).text for event in events]
    return f"{counted(len(texts), 'anomaly', 'anomalies')}: {some_of(texts, SHOWN, '; ')}" if texts else ""
