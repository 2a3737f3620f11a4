"""The reaction of training to a NaN, infinite or spiking loss or gradient. It is part of a stage's identity,
since it changes the result.

Invariant: the reaction at a step is a function of this spec, of the losses and gradient norms before it, and
of the step. It depends neither on when checkpoints were committed nor on interruptions.
"""

from __future__ import annotations

from typing import Literal

from specs.base import Spec, execution, identity


class Anomalies(Spec):
    """The reaction to a NaN, infinite or spiking loss or gradient norm (before clipping).

    `stop` ends the stage with an error, without another attempt. `skip` leaves weights and moments as they
    are and continues with the next step and batch. `rollback` restores weights and moments from a checkpoint
    of this segment and continues with the next step and batch, so the samples since the checkpoint are not
    trained on again; without a checkpoint of the segment it skips.

    A value spikes when it exceeds mean + spike_threshold x standard deviation of its last `window` accepted
    values, once there are that many: the rule of OLMo-core's SkipStepOptimizer."""

    nonfinite: Literal["stop", "skip", "rollback"] = identity(
        "stop", neutral="stop", description="what to do at a NaN or an infinity"
    )
    spike: Literal["ignore", "stop", "skip", "rollback"] = identity("ignore", neutral="ignore")
    spike_threshold: float = identity(
        6.0, neutral=6.0, gt=0, description="how far above the mean a value spikes, in standard deviations"
    )
    window: int = identity(128, neutral=128, ge=2, description="accepted steps that a value is compared with")
    rollback_interval: int = identity(
        100,
        neutral=100,
        ge=1,
        description="a rollback goes to a multiple of this many steps of the stage; a checkpoint is made at "
        "each and kept as long as needed",
    )
    rollback_margin: int = identity(
        100,
        neutral=100,
        ge=1,
        description="minimum number of steps that a rollback goes back",
    )
    max_events: int = execution(
        10,
        ge=0,
        description="anomalies of a segment that are skipped or rolled back; the stage stops at the next one",
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
