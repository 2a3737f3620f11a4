"""The reports of a run while it trains: a row of metrics per step, held-out losses, norms, anomalies.

Invariant: loss and norm are those of the whole run, not of a rank; only rank 0 has rows.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch.distributed as dist
from torchtitan.components.metrics import MetricsProcessor

from apertus_model.trainer.evaluator import HeldOutLoss
from specs.anomalies import Event

Row = dict[str, float]
"""The metrics of a step: those that `StepMetrics.log` lists, and the columns of the objective, averaged over
the step."""


class Recorder(Protocol):
    """The receiver of a run's reports: rows of steps on rank 0 only, everything else on all ranks."""

    def add_step(self, row: Row) -> None: ...
    def add_heldout(self, step: int, losses: Mapping[str, HeldOutLoss]) -> None: ...
    def add_norms(self, step: int, norms: Mapping[str, float]) -> None: ...
    def add_anomaly(self, event: Event) -> None: ...


class StepMetrics(MetricsProcessor):
    """A metrics processor that turns torchtitan's call after each step into a row for the recorder."""

    @dataclass(kw_only=True, slots=True)
    class Config(MetricsProcessor.Config):
        recorder: Recorder
        tokens_at: Callable[[int], int]  # number of steps done -> tokens consumed by the stage
        tokens_per_step: int

    config: Config
    time_last_log: float
    # of the current step, over all ranks; set by the trainer
    trained_tokens: int = 0
    columns: Row = {}  # noqa: RUF012 - further metrics; replaced, never changed

    def should_log(self, step: int) -> bool:
        """True at every step, so that a run that goes wrong is noticed at once."""
        return True

    def log(
        self,
        step: int,
        global_avg_loss: float,
        global_max_loss: float,
        grad_norm: float,
        extra_metrics: dict[str, float] | None = None,
    ) -> None:
        """Called by torchtitan's Trainer on every rank when a step is done."""
        now = time.perf_counter()
        seconds, self.time_last_log = now - self.time_last_log, now
        self.ntokens_since_last_log = 0
        self.data_loading_times.clear()
        if dist.get_rank() != 0:
            return
        tokens_per_step = self.config.tokens_per_step
        self.config.recorder.add_step(
            {
                "step": step,
                "tokens": self.config.tokens_at(step),  # consumed by the stage
                "loss": global_avg_loss,  # nats per trained token of the global batch
                "grad_norm": grad_norm,  # of the whole gradient, before clipping
                "lr": (extra_metrics or {})["lr"],
                "tokens_per_second": round(tokens_per_step / seconds, 1),  # of the whole run
                "masked_share": round(1 - self.trained_tokens / tokens_per_step, 6),  # of the labels
                "time": round(time.time(), 3),  # unix time
                **self.columns,
            }
        )
