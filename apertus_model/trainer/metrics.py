"""What a run reports while it trains: one row per step.

A row is `{"step", "tokens", "loss", "grad_norm", "lr", "tokens_per_second", "masked_share", "time"}`: tokens consumed by the
stage, loss in nats per trained token over the global batch, global gradient norm before clipping, tokens per second of the
whole run, share of the labels that were not trained, unix time. An objective adds columns of its own, averaged over the step.

Invariant: loss and norm are those of the whole run, not of a rank; rank 0 alone reports.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torchtitan.components.metrics import MetricsProcessor

Row = dict[str, Any]


class StepMetrics(MetricsProcessor):
    """Turns torchtitan's call after each step into a row for `Config.record`."""

    @dataclass(kw_only=True, slots=True)
    class Config(MetricsProcessor.Config):
        record: Callable[[Row], None]
        tokens_at: Callable[[int], int]
        tokens_per_step: int

    config: Config
    time_last_log: float
    trained_tokens: torch.Tensor | int = 0  # of the current step, all ranks; set by the trainer
    columns: Callable[[], Row] = dict  # further columns of the current step; collective; set by the trainer

    def should_log(self, step: int) -> bool:
        """Every step: the loss is also how a run that went wrong is noticed."""
        return True

    def log(
        self,
        step: int,
        global_avg_loss: float,
        global_max_loss: float,
        grad_norm: float,
        extra_metrics: dict[str, Any] | None = None,
    ) -> None:
        """Called by torchtitan's Trainer on every rank when a step is done."""
        now = time.perf_counter()
        seconds, self.time_last_log = now - self.time_last_log, now
        self.ntokens_since_last_log = 0
        self.data_loading_times.clear()
        columns = self.columns()
        if dist.get_rank() != 0:
            return
        tokens_per_step = self.config.tokens_per_step
        self.config.record(
            {
                "step": step,
                "tokens": self.config.tokens_at(step),
                "loss": global_avg_loss,
                "grad_norm": grad_norm,
                "lr": (extra_metrics or {})["lr"],
                "tokens_per_second": round(tokens_per_step / seconds, 1),
                "masked_share": round(1 - int(self.trained_tokens) / tokens_per_step, 6),
                "time": round(time.time(), 3),
                **columns,
            }
        )
