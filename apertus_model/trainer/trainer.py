"""torchtitan's Trainer with its own loop: it stops on request, validates per source, skips anomalous steps.

Invariants:
- All ranks stop after the same step, with a checkpoint of it.
- The state after step s is a function of the state after step s - 1, of the spec and of s. A run that was
  interrupted and resumed has the same bits as one that was not (same machine, layout and number of threads).
- A step that is not taken (`trainer.anomalies`) leaves weights and optimizer state as they were, or resets them to
  an earlier checkpoint; step and data continue. Rank 0 decides for all ranks.
- The denominator of the loss is counted over the whole step before any gradient is computed, so that the loss
  depends neither on ranks nor on micro-batches.
"""

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.attention.flex_attention import BlockMask
from torchtitan.components.loss import IGNORE_INDEX, BaseLoss
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.distributed import utils as dist_utils
from torchtitan.distributed.context_parallel import cp_shard
from torchtitan.trainer import Trainer

from apertus_model.device import set_collective_timeout
from apertus_model.optimizers.extra_pass import WithExtraPass
from apertus_model.trainer.anomalies import AnomalyDetector, AnomalyState
from apertus_model.trainer.checkpoint import CheckpointStorage, Source, UploadError
from apertus_model.trainer.evaluator import Evaluator, HeldOutLoss, PipelineEvaluator
from apertus_model.trainer.hang import SLOW_FACTOR, HangWatch
from apertus_model.trainer.loader import Batch, TrainingData
from apertus_model.trainer.metrics import Recorder, Row
from apertus_model.trainer.objectives import ExtraPass, MicroBatch, MicroBatchLoss, Objective, with_places

logger = logging.getLogger(__name__)


class NoTokenizer(BaseTokenizer):
    """torchtitan builds a tokenizer; this trainer reads token ids and needs none."""

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


class OutputIsLoss(BaseLoss):
    """torchtitan's loss function of a pipeline: the output of the last stage is the loss."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseLoss.Config):
        pass

    def __init__(self, config: Config, *, compile_config: Any = None) -> None:
        self.fn = lambda loss, labels: loss


@dataclass(frozen=True)
class Lifecycle:
    """Where a run begins, where its checkpoints go, and what ends it."""

    begin_step: int  # steps of the stage that are done
    source: Source | None  # checkpoint to begin from; None: initial weights
    storage: CheckpointStorage
    stop_requested: Callable[[], bool]  # whether this process was asked to stop
    scratch: str  # local folder for torchtitan's own files
    anomalies: AnomalyState = field(default_factory=AnomalyState)  # of the checkpoint that is resumed
    first_step_done: Callable[[], None] = lambda: None  # called then: from now on there is something to commit
    watch: HangWatch | None = None  # ends the process when it hangs
    clock: Callable[[], float] = time.monotonic  # for checkpoints by time


class ApertusTrainer(Trainer):
    """One segment: `Lifecycle.begin_step` to `Config.training.steps`, both counted within the stage."""

    @dataclass(kw_only=True, slots=True)
    class Config(Trainer.Config):
        objective: Objective
        data: TrainingData
        recorder: Recorder
        lifecycle: Lifecycle
        detector: AnomalyDetector
        heldout_interval: int = 0  # steps from one measurement of the held-out losses to the next; 0: none
        save_seconds: float | None = None  # from one checkpoint to the next, at most

        def to_dict(self) -> dict[str, Any]:
            """Nothing: torchtitan would copy all fields, for loggers that are not used here."""
            return {}

    config: Config
    _objective: Objective  # of the pass that runs
    _denominator: torch.Tensor  # of the current step, all ranks
    _columns: dict[str, torch.Tensor]  # name -> (sum, number) of the current step, this rank

    def train(self) -> bool:
        """Trains until the last step, or until a rank is asked to stop, and commits a checkpoint of that step.

        Returns:
            Whether the last step was reached.

        Raises:
            UploadError: a checkpoint was not stored.
            AnomalyError: a step at which the policy says to stop.
        """
        config, lifecycle = self.config, self.config.lifecycle
        self._heartbeat(SLOW_FACTOR)
        self._control = dist.new_group(backend="gloo") if dist.get_world_size() > 1 else None
        self.checkpointer.load()
        self.checkpointer.anomalies = config.detector.state  # StoreCheckpoints
        self.step = lifecycle.begin_step
        self.lr_schedulers.seek(self.step)  # LearningRate
        self.dataloader.seek(self.step)  # SampleLoader
        self.metrics_processor.columns = self._mean_columns  # StepMetrics
        batches = self.batch_generator(self.dataloader)
        saved = lifecycle.clock()
        while self.step < config.training.steps:
            overdue = config.save_seconds is not None and lifecycle.clock() - saved >= config.save_seconds
            stop, overdue = self._sync_requests(overdue)
            if stop:
                break
            self.step += 1
            self.gc_handler.run(self.step)
            self.train_step(batches)
            if self.step == lifecycle.begin_step + 1:
                lifecycle.first_step_done()
                timeout = timedelta(seconds=config.comm.train_timeout_seconds)
                set_collective_timeout(timeout, self.parallel_dims)
            last = self.step == config.training.steps
            self._heartbeat(SLOW_FACTOR)
            if config.heldout_interval and (last or self.step % config.heldout_interval == 0):
                config.recorder.add_heldout(self.step, self.heldout_losses())
                self._heartbeat(SLOW_FACTOR)
            if self.checkpointer.save(self.step, last_step=last or overdue):
                saved = lifecycle.clock()
            self._heartbeat()
        self._heartbeat(SLOW_FACTOR)
        finished = self.step == config.training.steps
        if not finished:
            logger.info("stopping after step %d of %d, as requested", self.step, config.training.steps)
            if self.step > lifecycle.begin_step:
                self.checkpointer.save(self.step, last_step=True)
        self.checkpointer.maybe_wait_for_saving()
        return finished

    def _heartbeat(self, factor: float = 1.0) -> None:
        if self.config.lifecycle.watch is not None:
            self.config.lifecycle.watch.heartbeat(factor)

    def _sync_requests(self, overdue: bool) -> tuple[bool, bool]:
        """Whether any rank was asked to stop, and whether a checkpoint is overdue by rank 0's clock. Collective.

        Raises:
            UploadError: a rank did not store its part of a checkpoint.
        """
        overdue = overdue and dist.get_rank() == 0
        flags = torch.tensor([self.config.lifecycle.stop_requested(), overdue, self.checkpointer.failed], dtype=torch.int32)
        if self._control is not None:
            dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=self._control)
        stop, overdue, failed = flags.tolist()
        if failed:
            self.checkpointer.maybe_wait_for_saving()
            raise UploadError(f"the checkpoint of step {self.checkpointer.saved_step} was not stored: another rank has the reason")
        return bool(stop), bool(overdue)

    def close(self) -> None:
        """Ends the threads that read ahead, and torchtitan's components."""
        self.dataloader.close()  # SampleLoader
        super().close()

    def heldout_losses(self) -> dict[str, HeldOutLoss]:
        """Loss on the held-out sequences of each source. Collective."""
        batch_size = self.config.training.local_batch_size
        part, dims, device = self.model_parts[0], self.parallel_dims, self.device
        if dims.pp_enabled:
            evaluator: Evaluator = PipelineEvaluator(part, self.pipelined_loss, dims, device, batch_size=batch_size)
        else:
            evaluator = Evaluator(part, dims, device, batch_size=batch_size)
        # Layers that were compiled under tensor parallelism fail on inputs without gradients (torch 2.13).
        with torch.compiler.set_stance("force_eager" if dims.tp_enabled else "default"), self.optimizers.averaged():  # Optimizers
            return {name: evaluator.loss(samples) for name, samples in self.config.data.heldout.items()}

    def train_step(self, data_iterator: Iterator[Batch]) -> None:
        """Computes the gradients of one global batch, and takes an optimizer step unless they are anomalous.

        As torchtitan's, which looks at the loss after the update; here the loss comes first.
        """
        dims = self.parallel_dims
        self._columns = {}
        rate = self.lr_schedulers.get_metrics()
        number = self.num_pipeline_parallel_microbatches
        groups = [[next(data_iterator) for _ in range(number)] for _ in range(self.gradient_accumulation_steps)]
        trained = sum(((labels != IGNORE_INDEX).sum() for group in groups for _, labels in group), torch.tensor(0)).to(self.device)
        if dims.dp_enabled:
            trained = dist_utils.dist_sum_tensor(trained, dims.get_mesh("batch"))
        if not dims.pp_enabled:
            self._prepare_objective([batch for group in groups for batch in group])
        self.optimizers.zero_grad(set_to_none=True)
        losses = []
        for group in groups:
            inputs: Any = [{name: tensor.to(self.device) for name, tensor in fields.items()} for fields, _ in group]
            labels: Any = [its_labels.to(self.device) for _, its_labels in group]
            if not dims.pp_enabled:
                (inputs,), (labels,) = inputs, labels
            losses.append(self.forward_backward_step(input_dict=inputs, labels=labels, global_valid_tokens=trained).detach())
        total = losses[0].clone()
        for loss in losses[1:]:
            total.add_(loss)
        norm = dist_utils.clip_grad_norm_(
            [parameter for part in self.model_parts for parameter in part.parameters()],
            self.config.training.max_norm,
            foreach=True,
            pp_mesh=dims.get_optional_mesh("pp"),
            ep_enabled=dims.ep_enabled,
        )
        loss = dist_utils.dist_sum(total, dims.get_optional_mesh("loss")) if dims.dp_cp_enabled else float(total.item())
        if self._accept_step(loss, float(norm.item())):
            self.optimizers.step()
            self.lr_schedulers.step()
            self.metrics_processor.log(self.step, loss, loss, float(norm.item()), extra_metrics=rate)
        else:
            self.lr_schedulers.step()
            self.metrics_processor.time_last_log = time.perf_counter()

    def _accept_step(self, loss: float, grad_norm: float) -> bool:
        """Whether the step is taken. If not, the anomaly is recorded, and rolled back if the policy says so. Collective.

        Raises:
            AnomalyError: the policy says to stop.
        """
        if self._control is not None:
            measured = torch.tensor([loss, grad_norm], dtype=torch.float64)
            dist.broadcast(measured, src=0, group=self._control)
            loss, grad_norm = measured.tolist()
        event = self.config.detector.check(self.step, loss, grad_norm)
        if event is None:
            return True
        logger.warning("%s", event.text)
        if event.action != "skip":
            self._heartbeat(SLOW_FACTOR)  # storage comes next
        self.config.recorder.add_anomaly(event)
        if event.action == "stop":
            if self._control is not None:
                # Rank 0 has stored the event: the first process that ends takes the others with it.
                dist.barrier(group=self._control)
            raise self.config.detector.error(event)
        if event.to is not None:
            self.checkpointer.maybe_wait_for_saving()
            if self._control is not None:
                dist.barrier(group=self._control)  # rank 0 has committed
            self.checkpointer.restore(event.to)
        return False

    def _prepare_objective(self, batches: Sequence[Batch]) -> None:
        """Counts the denominator of the step's loss, and runs the extra passes of optimizers. Collective."""
        objective = self.config.objective
        self._denominator = torch.stack([objective.count(labels, inputs) for inputs, labels in batches]).sum().to(self.device)
        if self.parallel_dims.dp_enabled:
            dist.all_reduce(self._denominator, group=self.parallel_dims.get_mesh("batch").get_group())
        for optimizer in self.optimizers.extra_passes():  # Optimizers
            self._extra_pass(optimizer, batches)
        self._objective = objective

    def _extra_pass(self, optimizer: WithExtraPass, batches: Sequence[Batch]) -> None:
        """A pass over the step's batch with the optimizer's own loss, whose gradients it reads."""
        self._objective = ExtraPass(optimizer, self.step)
        self.optimizers.zero_grad()
        for rows, (inputs, labels) in zip(self.dataloader.rows(), batches, strict=True):
            tensors = {name: tensor.to(self.device) for name, tensor in with_places(inputs, labels, rows).items()}
            self.forward_backward_step(input_dict=tensors, labels=labels.to(self.device), global_valid_tokens=self._denominator)
        optimizer.take_extra_gradients()  # train_step drops the gradients

    def forward_backward_step(
        self, *, input_dict: dict[str, torch.Tensor], labels: torch.Tensor, global_valid_tokens: torch.Tensor
    ) -> torch.Tensor:
        """Runs forward and backward pass of one micro-batch. Returns its part of the step's loss, which the objective
        computes inside of the model's output layer: `apertus_model.model.output` shows the calls."""
        self.metrics_processor.trained_tokens = global_valid_tokens  # StepMetrics
        if self.parallel_dims.pp_enabled:
            return super().forward_backward_step(input_dict=input_dict, labels=labels, global_valid_tokens=global_valid_tokens)
        objective = self._objective
        extras = {name: input_dict.pop(name) for name in objective.fields}
        inputs, labels, arguments = self.post_dataloading_process(input_dict, labels)
        group = None
        if self.parallel_dims.cp_enabled:
            mesh = self.parallel_dims.get_mesh("cp")
            group = mesh.get_group()
            if objective.per_token:
                slices, _ = cp_shard(mesh, tuple(extras[name] for name in objective.per_token), None, None)
                extras |= dict(zip(objective.per_token, slices, strict=True))
        with self.train_context():
            loss_fn = partial(objective.loss, batch=MicroBatch(extras, self._denominator, group))
            micro_batch: MicroBatchLoss = self.model_parts[0](inputs, **arguments, labels=labels, loss_fn=loss_fn)
            micro_batch.loss.backward()
        for name, column in micro_batch.columns.items():
            self._columns[name] = self._columns.get(name, 0) + column
        return micro_batch.loss / micro_batch.copies

    def pp_forward_backward_step(
        self, *, input_dict_mbs: list[dict[str, torch.Tensor]], label_mbs: list[torch.Tensor], global_valid_tokens: torch.Tensor
    ) -> torch.Tensor:
        """Runs all micro-batches of a step through the pipeline. Returns the loss on every stage."""
        batch = {name: torch.cat([inputs[name] for inputs in input_dict_mbs]) for name in input_dict_mbs[0]}
        return self.pipelined_loss(batch, torch.cat(label_mbs), global_valid_tokens)

    def pipelined_loss(self, batch: dict[str, torch.Tensor], labels: torch.Tensor, denominator: torch.Tensor) -> torch.Tensor:
        """The loss of whole rows, which the schedule cuts into micro-batches; the same on every stage. Computes
        gradients where they are enabled.

        torchtitan 0.3.0 passes lists of micro-batches, which the schedules of torch 2.13 do not take.

        Args:
            batch: input and positions, int64 of shape (batch, seq_len), as many rows as
                `training.local_batch_size`.
            labels: like the input.
            denominator: scalar that divides the sum over the labels.
        """
        inputs, labels, arguments = self.post_dataloading_process(batch, labels)
        # Of masks, the schedule can cut block masks alone: each stage makes the others from the positions.
        if not isinstance(arguments.get("attention_masks"), BlockMask):
            arguments.pop("attention_masks", None)
        if self.pp_has_last_stage:
            loss = partial(self.config.objective.loss, batch=MicroBatch({}, denominator))
            arguments |= {"labels": labels, "loss_fn": lambda *output: loss(*output).loss}
        losses: list[torch.Tensor] | None = [] if self.pp_has_last_stage else None
        run = self.pp_schedule.step if torch.is_grad_enabled() else self.pp_schedule.eval
        with self.train_context():
            run(
                *((inputs,) if self.pp_has_first_stage else ()),
                target=labels if self.pp_has_last_stage else None,
                losses=losses,
                return_outputs=False,
                **arguments,
            )
        total = torch.stack(losses).detach().sum().to(self.device) if losses else torch.zeros((), device=self.device)
        dist.all_reduce(total, group=self.parallel_dims.get_mesh("pp").get_group())
        return total

    def _mean_columns(self) -> Row:
        """The metrics of the objective, averaged over this step. Collective."""
        if not self._columns:
            return {}
        totals = torch.stack(list(self._columns.values()))
        if (mesh := self.parallel_dims.get_optional_mesh("loss")) is not None:
            dist.all_reduce(totals, group=mesh.get_group())
        return {name: total / number for name, (total, number) in zip(self._columns, totals.tolist(), strict=True) if number}
