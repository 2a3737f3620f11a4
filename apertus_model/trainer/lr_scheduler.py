"""The learning rate inside torchtitan: a pure function of the step.

Invariant: after `seek(s)` and after every `step()`, all parameter groups hold the rate of the next step.
There is no other state; nothing is stored in a checkpoint.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch.optim.lr_scheduler import LRScheduler
from torchtitan.components.optimizer import LRSchedulersContainer, OptimizersContainer


class LearningRate(LRSchedulersContainer):
    """A scheduler that sets the rate `rate(steps done)` in every group of every optimizer, times the group's
    own `lr_ratio` if it has one."""

    @dataclass(kw_only=True, slots=True)
    class Config(LRSchedulersContainer.Config):
        rate: Callable[[int], float]  # number of steps done -> learning rate of the next step
        warmup_steps: int = 0  # torchtitan only prints it

        def build(self, *, optimizers: OptimizersContainer, training_steps: int) -> "LearningRate":
            """Called by torchtitan's Trainer."""
            return LearningRate(optimizers, self.rate)

    def __init__(self, optimizers: OptimizersContainer, rate: Callable[[int], float]) -> None:
        self.schedulers: list[LRScheduler] = []
        self._optimizers = optimizers
        self._rate = rate
        self.seek(0)

    def seek(self, steps_done: int) -> None:
        """Continues after `steps_done` steps of the stage."""
        self._steps_done = steps_done
        rate = self._rate(steps_done)
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate * group.get("lr_ratio", 1.0)

    def step(self) -> None:
        """Called when an optimizer step is done."""
        self.seek(self._steps_done + 1)

    def get_metrics(self) -> dict[str, float]:
        """`{"lr": rate of the next step}`."""
        return {"lr": self._rate(self._steps_done)}

    def state_dict(self) -> dict[str, Any]:
        """An empty dict: there is nothing to remember."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Does nothing: there is no state."""
