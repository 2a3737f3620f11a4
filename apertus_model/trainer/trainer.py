"""torchtitan's Trainer with a loop of our own: it stops when asked, validates per source, and ends where the spec says.

Invariants:
- All ranks stop after the same step, with a checkpoint of it.
- The state after step s is a function of the state after step s - 1, of the spec and of s. Interrupting and going on from a
  checkpoint gives the same bits as never having stopped (same machine, same layout, same number of threads).
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.trainer import Trainer

from apertus_model.trainer.device import set_collective_timeout
from apertus_model.trainer.heldout import Evaluator, HeldOutLoss
from apertus_model.trainer.loader import SampleLike

logger = logging.getLogger(__name__)


class NoTokenizer(BaseTokenizer):
    """torchtitan builds a tokenizer; the engine trains on token ids and has no use for one."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        pass

    def __init__(self, config: Config, *, tokenizer_path: str) -> None:
        super().__init__()

    def encode(self, *args: Any, **kwargs: Any) -> list[int]:
        """Never called."""
        raise TypeError("the training engine does not tokenise")

    def decode(self, *args: Any, **kwargs: Any) -> str:
        """Never called."""
        raise TypeError("the training engine does not tokenise")

    def get_vocab_size(self) -> int:
        """Never called."""
        raise TypeError("the training engine does not tokenise")


class ApertusTrainer(Trainer):
    """One segment: `Config.begin_step` to `Config.training.steps`, both counted within the stage."""

    @dataclass(kw_only=True, slots=True)
    class Config(Trainer.Config):
        begin_step: int
        stop_requested: Callable[[], bool]
        heldout: dict[str, Sequence[SampleLike]] = field(default_factory=dict)
        heldout_interval: int = 0
        record_heldout: Callable[[int, dict[str, HeldOutLoss]], None]

    config: Config

    def train(self) -> bool:
        """Train until the last step, or until a rank is asked to stop.

        Returns:
            Whether the last step was reached. If not, and if a step was made, there is a checkpoint of the step it stopped at.
        """
        config = self.config
        self.checkpointer.load()
        self.step = config.begin_step
        self.lr_schedulers.seek(self.step)  # LearningRate
        self.dataloader.seek(self.step)  # SampleLoader
        batches = self.batch_generator(self.dataloader)
        stop_group = dist.new_group(backend="gloo") if dist.get_world_size() > 1 else None
        while self.step < config.training.steps and not self._agreed_to_stop(stop_group):
            self.step += 1
            self.gc_handler.run(self.step)
            self.train_step(batches)
            if self.step == config.begin_step + 1:
                timeout = timedelta(seconds=config.comm.train_timeout_seconds)
                set_collective_timeout(timeout, self.parallel_dims)
            last = self.step == config.training.steps
            if config.heldout_interval and (last or self.step % config.heldout_interval == 0):
                config.record_heldout(self.step, self.heldout_losses())
            self.checkpointer.save(self.step, last_step=last)
        finished = self.step == config.training.steps
        if not finished:
            logger.info("stopping after step %d of %d, as requested", self.step, config.training.steps)
            if self.step > config.begin_step:
                self.checkpointer.save(self.step, last_step=True)
        return finished

    def heldout_losses(self) -> dict[str, HeldOutLoss]:
        """Loss on the held-out sequences of each source. Collective."""
        evaluator = Evaluator(self.model_parts[0], self.parallel_dims, self.device, batch_size=self.config.training.local_batch_size)
        return {name: evaluator.loss(samples) for name, samples in self.config.heldout.items()}

    def forward_backward_step(self, *, global_valid_tokens: torch.Tensor, **batch: Any) -> torch.Tensor:
        """One micro-batch; notes for the metrics how many tokens the whole step trains on."""
        self.metrics_processor.trained_tokens = global_valid_tokens  # StepMetrics
        return super().forward_backward_step(global_valid_tokens=global_valid_tokens, **batch)

    def _agreed_to_stop(self, group: dist.ProcessGroup | None) -> bool:
        """Whether any rank was asked to stop; the same answer on all of them."""
        requested = torch.tensor(int(self.config.stop_requested()))
        if group is not None:
            dist.all_reduce(requested, op=dist.ReduceOp.MAX, group=group)
        return bool(requested)
