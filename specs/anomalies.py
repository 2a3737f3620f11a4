"""What is done about a step whose loss or gradient is not what it should be. Part of a stage's identity, since it changes the result.

Invariant: what is done at a step is a function of this spec, of the losses and gradient norms before it, and of the step: neither of when
checkpoints were committed nor of interruptions.
"""

from __future__ import annotations

from typing import Literal

from specs.base import Spec, execution, identity


class Anomalies(Spec):
    """NaN, infinite or spiking loss or gradient norm (before clipping). `stop`: the stage ends with an error and is not tried again.
    `skip`: the batch is passed over: weights and moments stay as they are, step and data go on. `rollback`: weights and moments come back
    from a checkpoint of this segment, step and data go on, so that the samples in between are not trained on again; a skip where there is
    none yet.

    A value spikes when it is above mean + spike_threshold x standard deviation of its last `window` accepted values, once there are so
    many: the rule of OLMo-core's SkipStepOptimizer."""

    nonfinite: Literal["stop", "skip", "rollback"] = identity("stop", neutral="stop", description="at a NaN or infinity")
    spike: Literal["ignore", "stop", "skip", "rollback"] = identity("ignore", neutral="ignore")
    spike_threshold: float = identity(6.0, neutral=6.0, gt=0, description="in standard deviations")
    window: int = identity(128, neutral=128, ge=2, description="accepted steps that a value is compared with")
    rollback_interval: int = identity(
        100,
        neutral=100,
        ge=1,
        description="a rollback goes to a multiple of so many steps of the stage; their checkpoints are made, and kept as long as needed",
    )
    rollback_margin: int = identity(100, neutral=100, ge=1, description="least number of steps that a rollback goes back")
    max_events: int = execution(10, ge=0, description="anomalies of a segment that are passed over; the stage stops at the next one")

    @property
    def rolls_back(self) -> bool:
        return "rollback" in (self.nonfinite, self.spike)

    @property
    def skips(self) -> bool:
        """Also where a rollback may turn into a skip."""
        return {"skip", "rollback"} & {self.nonfinite, self.spike} != set()

    def rollback_from(self, step: int, begin: int) -> float:
        """When `step` is done, the earliest step that a later rollback may go to, in a segment that begins after `begin`: checkpoints from
        there on are kept."""
        if not self.rolls_back:
            return float("inf")
        back = self.rollback_step(step + 1, begin)
        return float("-inf") if back is None else back

    def rollback_step(self, step: int, begin: int) -> int | None:
        """The step to whose state an anomaly of `step` rolls back, in a segment that begins after `begin`; None before there is one."""
        target = (step - self.rollback_margin) // self.rollback_interval * self.rollback_interval
        return target if target > begin else None
