"""torchtitan's Trainer with its own loop: it stops on request, validates per source, skips anomalous steps.

Invariants:
- All ranks stop after the same step, with a checkpoint of it.
- The state after step s is a function of the state after step s - 1, of the spec and of s. A run that was
  interrupted and resumed has the same bits as one that was not (same machine, layout and number of threads).
- A step that is not taken (`trainer.anomalies`) leaves weights and optimizer state as they were, or resets
  them to an earlier checkpoint; step and data continue. Rank 0 decides for all ranks.
- The denominator of the loss is counted over the whole step before any gradient is computed, so that the loss
  depends neither on ranks nor on micro-batches.
- The host waits for the GPU once a step, when all ranks agree on what was measured and asked for. Everything
  else that it has to know, it reads from the batch before this goes to the GPU.
"""

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torchtitan.components.loss import IGNORE_INDEX
from torchtitan.distributed import utils as dist_utils
from torchtitan.distributed.context_parallel import cp_shard
from torchtitan.trainer import Trainer

from apertus_model.device import set_collective_timeout
from apertus_model.model.on_host import OnHost, copy_to
from apertus_model.optimizers.hook import ExtraLoss
from apertus_model.trainer.anomalies import AnomalyDetector
from apertus_model.trainer.checkpoint import UploadError
from apertus_model.trainer.evaluator import Evaluator, HeldOutLoss
from apertus_model.trainer.hang import SLOW_FACTOR
from apertus_model.trainer.lifecycle import Lifecycle, RankRequests, agree
from apertus_model.trainer.loader import Batch, TrainingData, model_arguments
from apertus_model.trainer.metrics import Recorder
from apertus_model.trainer.objectives.base import MicroBatch, Objective, PipelinedLoss
from apertus_model.trainer.objectives.cross_entropy import CrossEntropy, ExtraPass, with_places
from apertus_model.trainer.objectives.domain_weights import DomainWeights
from apertus_model.trainer.optimizer import norms

logger = logging.getLogger(__name__)


class ApertusTrainer(Trainer):
    """One segment: `Lifecycle.begin_step` to `Config.training.steps`, both counted within the stage."""

    @dataclass(kw_only=True, slots=True)
    class Config(Trainer.Config):
        objective: Objective  # the loss
        # (role, spec, dims=, device=) -> the frozen model of the checkpoint that is this input, in a layout
        further_model: Callable[..., torch.nn.Module]
        data: TrainingData  # its held-out sequences are used; training samples come from `dataloader`
        recorder: Recorder  # stores metrics, held-out losses and anomalies
        lifecycle: Lifecycle
        detector: AnomalyDetector  # decides which steps are not taken
        heldout_interval: int = 0  # steps between two measurements of the held-out losses; 0: never
        norms_interval: int = 0  # steps between two measurements of norms; 0: never
        save_seconds: float | None = None  # longest time between two checkpoints; None: no limit

        def to_dict(self) -> dict[str, Any]:
            """An empty dict: torchtitan would copy all fields, for loggers that are not used here."""
            return {}

    config: Config
    _denominator: Tensor  # of the current step's loss, over all ranks
    _requests: RankRequests  # as of the last step
    _saved: float  # time of the last checkpoint
    _columns: dict[str, Tensor]  # metrics of the current step on this rank: name -> (sum, number)

    def train(self) -> bool:
        """Trains until the last step, or until a rank is asked to stop, and commits a checkpoint of that
        step. A request counts from the step in which it arrives before the host waits for the GPU. Returns
        whether the last step was reached. UploadError when a checkpoint was not stored, AnomalyError when the
        policy stops training at a step."""
        config, lifecycle = self.config, self.config.lifecycle
        lifecycle.heartbeat(SLOW_FACTOR)
        batches = self.begin()
        self._saved = lifecycle.clock()
        self._agree([])
        while self.step < config.training.steps and not self._requests.stop:
            self.step += 1
            self.gc_handler.run(self.step)
            self.train_step(batches)
            if self._requests.failed:
                self.checkpointer.maybe_wait_for_saving()
                raise UploadError(
                    f"the checkpoint of step {self.checkpointer.saved_step} was not stored: another rank has"
                    " the reason"
                )
            if self.step == lifecycle.begin_step + 1:
                lifecycle.first_step_done()
                timeout = timedelta(seconds=config.comm.train_timeout_seconds)
                set_collective_timeout(timeout, self.parallel_dims)
            last = self.step == config.training.steps
            lifecycle.heartbeat(SLOW_FACTOR)
            if config.norms_interval and (last or self.step % config.norms_interval == 0):
                by_group = norms(self.model_parts, self.optimizers, self.parallel_dims)
                config.recorder.add_norms(self.step, by_group)
                for event in config.detector.check_norms(self.step, by_group):
                    config.recorder.add_anomaly(event)
            if config.heldout_interval and (last or self.step % config.heldout_interval == 0):
                config.recorder.add_heldout(self.step, self.heldout_losses())
                lifecycle.heartbeat(SLOW_FACTOR)
            if self.checkpointer.save(self.step, last_step=last or self._requests.save):
                self._saved = lifecycle.clock()
            lifecycle.heartbeat()
        lifecycle.heartbeat(SLOW_FACTOR)
        finished = self.step == config.training.steps
        if not finished:
            logger.info("stopping after step %d of %d, as requested", self.step, config.training.steps)
            if self.step > lifecycle.begin_step:
                self.checkpointer.save(self.step, last_step=True)
        self.checkpointer.maybe_wait_for_saving()
        return finished

    def begin(self) -> Iterator[Batch]:
        """Loads the state to begin from. Returns the batches of the steps after it. Collective."""
        config = self.config
        self.checkpointer.load()
        self.checkpointer.anomalies = config.detector.state  # StoreCheckpoints
        if isinstance(config.objective, DomainWeights):
            self.checkpointer.objective = config.objective.state
        if not self.parallel_dims.pp_enabled or self.pp_has_last_stage:
            config.objective.begin(partial(config.further_model, dims=self.parallel_dims, device=self.device))
        self.step = config.lifecycle.begin_step
        self.lr_schedulers.seek(self.step)  # LearningRate
        self.dataloader.seek(self.step)  # SampleLoader
        return self.batch_generator(self.dataloader)

    def _agree(self, measured: Sequence[Tensor], *, overdue: bool = False) -> list[float]:
        """The measurements of rank 0; sets `_requests`. Waits for the GPU. Collective."""
        own = RankRequests(self.config.lifecycle.stop_requested(), overdue, self.checkpointer.failed)
        self._requests, measurements = agree(own, measured, self.device)
        return measurements

    def _overdue(self) -> bool:
        """Whether a checkpoint is overdue by this rank's clock."""
        seconds = self.config.save_seconds
        return seconds is not None and self.config.lifecycle.clock() - self._saved >= seconds

    def close(self) -> None:
        """Ends the threads that read ahead, and torchtitan's components."""
        self.dataloader.close()  # SampleLoader
        super().close()

    def heldout_losses(self) -> dict[str, HeldOutLoss]:
        """Loss on the held-out sequences of each source. Collective."""
        batch_size = self.config.training.local_batch_size
        part, dims = self.model_parts[0], self.parallel_dims
        loss = partial(self.pipelined_loss, CrossEntropy()) if dims.pp_enabled else None
        evaluator = Evaluator(part, dims, self.device, batch_size=batch_size, pipelined_loss=loss)
        # Layers that were compiled under tensor parallelism fail on inputs without gradients (torch 2.13).
        with (
            torch.compiler.set_stance("force_eager" if dims.tp_enabled else "default"),
            self.optimizers.averaged(),  # Optimizers
        ):
            objective, heldout = self.config.objective, self.config.data.heldout
            return {name: objective.heldout_loss(evaluator, samples) for name, samples in heldout.items()}

    def train_step(self, data_iterator: Iterator[Batch]) -> None:
        """Computes the gradients of one global batch, and takes an optimizer step unless they are anomalous.
        torchtitan's method takes the step first and reads the loss afterwards."""
        dims = self.parallel_dims
        self._columns = {}
        learning_rates = self.lr_schedulers.get_metrics()  # of this step; `lr_schedulers.step` changes them

        # All groups make up one optimizer step; each is one forward and backward pass.
        microbatch_groups = [
            [next(data_iterator) for _ in range(self.num_pipeline_parallel_microbatches)]
            for _ in range(self.gradient_accumulation_steps)
        ]
        batches = [batch for group in microbatch_groups for batch in group]
        trained_tokens, self._denominator = self._count(batches)
        if not dims.pp_enabled:
            self.optimizers.before_step(self.step, partial(self._extra_pass, batches))  # Optimizers

        self.optimizers.zero_grad(set_to_none=True)
        losses = []
        objective = self.config.objective
        separate = objective if isinstance(objective, DomainWeights) else None
        trained = [
            weight for part in self.model_parts for weight in part.parameters() if weight.requires_grad
        ]
        with self.model_parts[0].in_passes():
            for number, group in enumerate(microbatch_groups, 1):
                losses.append(self._backward(objective, group).detach())
                if separate is not None and number % (len(microbatch_groups) // separate.parts) == 0:
                    separate.take(trained)
        if separate is not None:
            self._columns |= separate.combine(trained, self.step)
        accumulated_loss = sum(losses[1:], start=losses[0])

        grad_norm = dist_utils.clip_grad_norm_(
            [parameter for part in self.model_parts for parameter in part.parameters()],
            self.config.training.max_norm,
            foreach=True,
            pp_mesh=dims.get_optional_mesh("pp"),
            ep_enabled=dims.ep_enabled,
        )
        if dims.dp_cp_enabled:
            accumulated_loss = dist_utils.dist_sum_tensor(accumulated_loss, dims.get_optional_mesh("loss"))
        loss, norm, tokens, *sums = self._agree(
            [accumulated_loss, grad_norm, trained_tokens, *self._sums_of_columns()], overdue=self._overdue()
        )
        if self._accept_step(loss, norm):
            self.optimizers.step()
            self.lr_schedulers.step()
            self.metrics_processor.trained_tokens = int(tokens)  # StepMetrics
            self.metrics_processor.columns = {
                name: total / number
                for name, total, number in zip(self._columns, sums[::2], sums[1::2], strict=True)
                if number
            }
            self.metrics_processor.log(self.step, loss, loss, norm, extra_metrics=learning_rates)
        else:
            self.lr_schedulers.step()
            self.metrics_processor.time_last_log = time.perf_counter()

    def _accept_step(self, loss: float, grad_norm: float) -> bool:
        """Whether the step is taken; the same on all ranks. An anomaly is recorded, and training is rolled
        back if the policy says so. AnomalyError when it says to stop. Collective."""
        event = self.config.detector.check(self.step, loss, grad_norm)
        if event is None:
            return True
        logger.warning("%s", event.text)
        if event.action in ("stop", "rollback"):
            self.config.lifecycle.heartbeat(SLOW_FACTOR)  # what follows waits for storage
        self.config.recorder.add_anomaly(event)
        if event.action == "stop":
            # Rank 0 stores the event first: when one process ends, the others are ended too.
            dist.barrier()
            raise self.config.detector.error(event)
        if event.to is not None:
            self.checkpointer.maybe_wait_for_saving()
            dist.barrier()  # rank 0 has committed
            self.checkpointer.restore(event.to)
        return event.action == "report"

    def _count(self, batches: Sequence[Batch]) -> tuple[Tensor, Tensor]:
        """The number of labels that the step trains, and the denominator of its loss, over all ranks:
        float64, a scalar and the sum of `Objective.count`. Collective."""
        count = self.config.objective.count
        trained = torch.stack([(labels != IGNORE_INDEX).sum().double() for _, labels in batches])
        counted = torch.stack([count(labels, inputs) for inputs, labels in batches]).sum(0)
        totals = copy_to(torch.cat([trained.sum()[None], counted.flatten()]), self.device)
        if self.parallel_dims.dp_enabled:
            dist.all_reduce(totals, group=self.parallel_dims.get_mesh("batch").get_group())
        return totals[0], totals[1:].view(counted.shape)

    def _extra_pass(self, batches: Sequence[Batch], loss: ExtraLoss) -> None:
        """Sets the gradients to those of another loss on the step's batch, for `train_step`. Collective."""
        self.optimizers.zero_grad()
        with self.model_parts[0].in_passes():
            for rows, (inputs, labels) in zip(self.dataloader.rows(), batches, strict=True):
                self._backward(ExtraPass(loss), [(with_places(inputs, labels, rows), labels)])

    def _backward(self, objective: Objective, batches: Sequence[Batch]) -> Tensor:
        """Runs forward and backward pass of one micro-batch, or of those that go through a pipeline together,
        whose tensors are on the host. Returns their part of the step's loss; `apertus_model.model.output`
        shows the calls. In place of torchtitan 0.3.0's `forward_backward_step`, which passes lists of
        micro-batches that the schedules of torch 2.13 do not take."""
        if self.parallel_dims.pp_enabled:
            fields = {name: torch.cat([inputs[name] for inputs, _ in batches]) for name in batches[0][0]}
            all_labels = torch.cat([labels for _, labels in batches])
            return self.pipelined_loss(objective, fields, all_labels, self._denominator)
        ((inputs, labels),) = batches
        tokens, own_labels, _, batch = self._micro_batch(objective, inputs, labels, self._denominator)
        with self.train_context():
            micro_batch = objective.forward(self.model_parts[0], tokens, own_labels, batch)
            micro_batch.loss.backward()
        for name, column in micro_batch.columns.items():
            self._columns[name] = self._columns.get(name, 0) + column
        return micro_batch.loss / micro_batch.copies

    def pipelined_loss(
        self, objective: Objective, batch: dict[str, Tensor], labels: Tensor, denominator: Tensor
    ) -> Tensor:
        """The loss of whole rows, which the schedule cuts into micro-batches; the same on every stage.
        Computes gradients where they are enabled. `batch`: input, positions and the fields of the objective
        on the host, as many rows as `training.local_batch_size`; `denominator`: a scalar that divides the sum
        over the labels."""
        tokens, own_labels, arguments, whole = self._micro_batch(objective, batch, labels, denominator)
        if self.pp_has_last_stage:
            arguments = arguments | {"labels": own_labels, "loss_fn": PipelinedLoss(objective, whole)}
        losses: list[Tensor] | None = [] if self.pp_has_last_stage else None
        run = self.pp_schedule.step if torch.is_grad_enabled() else self.pp_schedule.eval
        with self.train_context():
            run(
                *((tokens,) if self.pp_has_first_stage else ()),
                target=own_labels.tensor if self.pp_has_last_stage else None,
                losses=losses,
                return_outputs=False,
                **arguments,
            )
        total = torch.zeros((), device=self.device)
        if losses:
            total = torch.stack(losses).detach().sum().to(self.device)
        dist.all_reduce(total, group=self.parallel_dims.get_mesh("pp").get_group())
        return total

    def _micro_batch(
        self, objective: Objective, batch: dict[str, Tensor], labels: Tensor, denominator: Tensor
    ) -> tuple[Tensor, OnHost, dict[str, Any], MicroBatch]:
        """Tokens, labels and further arguments of the model for this rank's part of the rows, and the inputs
        of the loss besides the labels."""
        dims = self.parallel_dims
        tokens, own_labels, arguments = model_arguments(
            self.model_parts[0], dims, self.device, batch["input"], batch["positions"], labels
        )
        extras = {name: copy_to(batch[name], self.device) for name in objective.fields}
        group = None
        if dims.cp_enabled:
            mesh = dims.get_mesh("cp")
            group = mesh.get_group()
            if objective.per_token:
                slices, _ = cp_shard(
                    mesh,
                    tuple(extras[name] for name in objective.per_token),
                    None,
                    self.config.parallelism.context_parallel_load_balancer,
                )
                extras |= dict(zip(objective.per_token, slices, strict=True))
        return tokens, own_labels, arguments, MicroBatch(extras, denominator, group, tokens, arguments)

    def _sums_of_columns(self) -> list[Tensor]:
        """(sum, number) of each metric of the objective, one after the other, over all ranks. Collective."""
        if not self._columns:
            return []
        totals = torch.stack(list(self._columns.values()))
        if (mesh := self.parallel_dims.get_optional_mesh("loss")) is not None:
            dist.all_reduce(totals, group=mesh.get_group())
        return list(totals.flatten().unbind())
