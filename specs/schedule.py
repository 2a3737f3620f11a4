"""The learning rate as a pure function of consumed tokens: warm-up, stable, decay (WSD).

Invariant: the rate of a step depends on the tokens consumed by the stage *before* that step, and on nothing
else. Sources: Apertus report section 2 and the released scripts (1-sqrt: lr_min + (lr_max - lr_min)(1 -
sqrt((s - s0) / D))); WSO arXiv 2603.16127 is `decay: none`.
"""

import math
from typing import Literal

from specs.base import Spec, identity, option
from specs.units import Budget

Decay = Literal["none", "1-sqrt", "linear", "cosine"]


class ScheduleSpec(Spec):
    """The schedule as written in the recipe. The planner resolves it into a `Schedule`."""

    warmup: Budget | None = identity(
        None, description="linear warm-up from `warmup_from` x peak; none by default"
    )
    warmup_from: float = identity(
        0.0,
        ge=0,
        le=1,
        description="fraction of the peak at token 0: 0 in the released scripts, 0.1 in the report",
    )
    decay: Decay = identity("none")
    decay_over: Budget | None = identity(
        None, description="the decay ends with the stage and is this long; the whole stage by default"
    )
    final: float = identity(0.1, ge=0, le=1, description="fraction of the peak at the end of the decay")


class Schedule(Spec):
    """The learning rate over the tokens that the stage has consumed. Fields that do not matter in a segment
    are neutral and not hashed."""

    offset: int = option(
        0,
        ge=0,
        description="tokens of the schedule before the stage, where the stage continues its parent's"
        " schedule",
    )
    warmup_tokens: int = option(0, ge=0, description="tokens of the warm-up")
    warmup_from: float = option(0.0, description="fraction of the peak at token 0")
    decay: Decay = option("none")
    decay_start: int = option(0, ge=0, description="tokens of the schedule before the decay")
    decay_tokens: int = option(0, ge=0, description="tokens of the decay")
    final: float = option(1.0, description="fraction of the peak at the end of the decay")

    def factor(self, tokens: int) -> float:
        """The learning rate of the step that begins after `tokens` tokens of this stage, as a share of the
        peak, which is the optimizer's `lr`."""
        tokens += self.offset
        if tokens < self.warmup_tokens:
            return self.warmup_from + (1.0 - self.warmup_from) * tokens / self.warmup_tokens
        if self.decay == "none" or tokens < self.decay_start:
            return 1.0
        done = min(1.0, (tokens - self.decay_start) / self.decay_tokens)
        shape = {
            "1-sqrt": 1.0 - math.sqrt(done),
            "linear": 1.0 - done,
            "cosine": 0.5 * (1.0 + math.cos(math.pi * done)),
        }[self.decay]
        return self.final + (1.0 - self.final) * shape
