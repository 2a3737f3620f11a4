"""The begin and the end of a run of the trainer, and what its ranks agree on once a step."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from apertus_model.model.on_host import copy_to
from apertus_model.trainer.anomalies import AnomalyState
from apertus_model.trainer.checkpoint import CheckpointSource, CheckpointStorage
from apertus_model.trainer.hang import HangWatch
from infra.store import Checkpoint


@dataclass(frozen=True)
class Lifecycle:
    """The settings of where a run begins, where its checkpoints go, and what ends it."""

    begin_step: int  # number of steps that the stage has already trained
    source: CheckpointSource | None  # checkpoint to begin from; None: initial weights
    storage: CheckpointStorage
    stop_requested: Callable[[], bool]  # whether this process was asked to stop
    scratch: str  # local folder for torchtitan's own files
    # the anomaly detector's state, from the checkpoint that is resumed
    anomalies: AnomalyState = field(default_factory=AnomalyState)
    # the state of an objective that has one, from the checkpoint that is continued; empty: the objective
    # begins anew
    objective: Mapping[str, Any] = field(default_factory=dict)
    # called after the first step, when there is something to commit
    first_step_done: Callable[[], None] = lambda: None
    watch: HangWatch | None = None  # ends the process when it hangs
    # the checkpoint among the segment's inputs that has this role; None: it is not read (rehearsal)
    checkpoint_of: Callable[[str], Checkpoint | None] = lambda role: None
    clock: Callable[[], float] = time.monotonic  # decides when `save_seconds` have passed

    def heartbeat(self, factor: float = 1.0) -> None:
        """Tells the watch that this process is alive; see `HangWatch.heartbeat`."""
        if self.watch is not None:
            self.watch.heartbeat(factor)


class RankRequests(NamedTuple):
    """The requests of one rank to all others, or those of all ranks together."""

    stop: bool  # the rank was asked to stop
    save: bool  # a checkpoint is overdue by the rank's clock; only rank 0's counts
    failed: bool  # the rank did not store its part of a checkpoint


def agree(
    own: RankRequests, measured: Sequence[torch.Tensor], device: torch.device
) -> tuple[RankRequests, list[float]]:
    """The requests of all ranks together, and the measurements of rank 0; the same on all ranks. Waits for
    the GPU. Collective. `measured`: scalars on `device`, equally many on every rank."""
    first = dist.get_rank() == 0
    asked = [own.stop, own.save and first, own.failed]
    numbers = torch.stack([
        *(scalar.double() if first else scalar.new_zeros((), dtype=torch.float64) for scalar in measured),
        *copy_to(torch.tensor(asked, dtype=torch.float64), device),
    ])  # fmt: skip
    dist.all_reduce(numbers)  # 0 + x is x, whatever the order
    *measurements, stop, save, failed = numbers.tolist()
    return RankRequests(bool(stop), bool(save), bool(failed)), measurements
