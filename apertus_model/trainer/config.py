"""Translates a resolved segment into torchtitan's `Trainer.Config`.

Invariant: every setting comes from the segment. Its identity fields decide the result; its execution fields
say where and how it is computed (layout, micro-batch). Combinations that cannot run are refused here, before
anything is built.
"""

import dataclasses
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any

import torch
from torchtitan.components.loss import BaseLoss
from torchtitan.config import CommConfig, CompileConfig, DebugConfig, ParallelismConfig, TrainingConfig
from torchtitan.distributed import ParallelDims
from torchtitan.distributed import activation_checkpoint as recomputed

from apertus_model.device import has_gpu
from apertus_model.model.attention_choice import Choice, Setting, resolve_backend
from apertus_model.model.float8 import linear_config
from apertus_model.model.model import ApertusModel, model_config
from apertus_model.model.parallelize import titan_model
from apertus_model.trainer.anomalies import AnomalyDetector
from apertus_model.trainer.checkpoint import StoreCheckpoints
from apertus_model.trainer.hang import HANG_SECONDS, SLOW_FACTOR
from apertus_model.trainer.lifecycle import Lifecycle
from apertus_model.trainer.loader import SampleLoader, TrainingData
from apertus_model.trainer.loading import load_model
from apertus_model.trainer.metrics import Recorder, StepMetrics
from apertus_model.trainer.objectives import objective_of
from apertus_model.trainer.objectives.domain_weights import DomainWeights
from apertus_model.trainer.optimizer import LearningRate, optimizer_config
from apertus_model.trainer.trainer import ApertusTrainer
from specs import layout
from specs.capabilities import OBJECTIVES
from specs.errors import StageError
from specs.launch import Parallel
from specs.model import ModelSpec
from specs.optimizer import refusals
from specs.stages.training import Segment

PIPELINE_SCHEDULES = {"1f1b": "1F1B", "gpipe": "GPipe", "interleaved-1f1b": "Interleaved1F1B"}
LOAD_BALANCERS = {"none": None, "head-tail": "headtail"}
COLLECTIVE_TIMEOUT_SECONDS = 1800  # for processes without a `HangWatch`


class NoTokenizer:
    """The config of no tokenizer: this trainer reads token ids."""

    def build(self, *, tokenizer_path: str) -> None:
        """Called by torchtitan's Trainer."""


class OutputIsLoss(BaseLoss):
    """torchtitan's loss function of a pipeline: the output of the last stage is the loss."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseLoss.Config):
        pass

    def __init__(self, config: Config, *, compile_config: Any = None) -> None:
        self.fn = lambda loss, labels: loss


def trainer_config(
    segment: Segment, data: TrainingData, recorder: Recorder, lifecycle: Lifecycle, *, world_size: int
) -> ApertusTrainer.Config:
    """The complete configuration of one run.

    Args:
        segment: resolved part of a training stage.
        data, recorder, lifecycle: as in `ApertusTrainer.Config`.
        world_size: number of processes.

    Raises:
        StageError: the optimizer cannot train in this layout, or minimise this objective.
        ValueError: the layout does not fit the processes or the batch, or the attention backend or float8
            cannot run here.
    """
    _refuse(segment, world_size)
    micro_batch = micro_batch_size(segment, world_size=world_size)
    parallelism = parallelism_config(
        segment.parallel, micro_batch_size=micro_batch, n_layers=segment.model.n_layers
    )
    objective = objective_of(segment)
    if isinstance(objective, DomainWeights) and lifecycle.objective:
        objective.resume(lifecycle.objective)
    return ApertusTrainer.Config(
        model_spec=titan_model(_model(segment)),
        dump_folder=lifecycle.scratch,
        tokenizer=NoTokenizer(),
        dataloader=SampleLoader.Config(
            samples=data.samples,
            first_sample=segment.sample_at,
            global_batch_size=segment.global_batch_size,
            fields=objective.fields,
        ),
        optimizer=optimizer_config(segment.optimizer),
        lr_scheduler=LearningRate.Config(
            rate=lambda steps_done: segment.lr_at(max(steps_done, segment.start_step))
        ),
        loss=OutputIsLoss.Config(),
        training=_training(segment, micro_batch, world_size),
        parallelism=parallelism,
        checkpoint=StoreCheckpoints.Config(
            enable=True,
            keep_latest_k=0,
            initial_load_model_only=False,
            last_save_model_only=False,
            storage=lifecycle.storage,
            source=lifecycle.source,
            due=segment.checkpoint_due,
        ),
        activation_checkpoint=recomputation_config(segment),
        compile=CompileConfig(enable=segment.compile, enable_async_tensor_parallel=segment.parallel.async_tp),
        comm=_timeouts(lifecycle),
        metrics=StepMetrics.Config(
            disable_color_printing=True,
            recorder=recorder,
            tokens_at=segment.tokens_at,
            tokens_per_step=segment.tokens_per_step,
        ),
        debug=debug_config(segment.seed or 0, deterministic=segment.deterministic),
        objective=objective,
        further_model=partial(_further_model, segment, lifecycle, parallelism),
        data=data,
        recorder=recorder,
        lifecycle=lifecycle,
        detector=AnomalyDetector(segment.anomalies, segment.start_step, lifecycle.anomalies),
        heldout_interval=segment.validation.interval if data.heldout else 0,
        norms_interval=segment.norms_interval,
        save_seconds=segment.checkpoint.seconds,
    )


def _refuse(segment: Segment, world_size: int) -> None:
    """Raises the errors of `trainer_config` for what cannot run in a layout."""
    assert segment.optimizer.name is not None, "the planner resolves the optimizer"
    name, parallel = segment.optimizer.name, segment.parallel
    for reason in refusals(name, segment.objective, segment.anomalies, parallel, world_size):
        raise StageError(reason)
    if parallel.pp > 1 and OBJECTIVES[segment.objective].pipeline_obstacle:
        raise ValueError(
            f"the objective {segment.objective!r} cannot run in a pipeline (pp: {parallel.pp}); use another"
            " layout"
        )
    if parallel.async_tp and not has_gpu():
        raise ValueError("launch.parallel.async_tp needs the symmetric memory of GPUs; there is no GPU here")


def _model(segment: Segment) -> ApertusModel.Config:
    return model_config(
        segment.model,
        sequence_length=segment.sequence_length,
        attention=attention_of(segment).backend,
        seed=segment.new_weights_seed,
        lora=segment.adapters,
        trainable=segment.trainable,
        linear_config=linear_config(segment.precision.linear, compiled=segment.compile),
    )


def _timeouts(lifecycle: Lifecycle) -> CommConfig:
    """Long enough that a rank that hangs reports where it hangs before the others give up waiting for it."""
    seconds = lifecycle.watch.seconds if lifecycle.watch is not None else HANG_SECONDS
    timeout = int(2 * SLOW_FACTOR * seconds)
    return CommConfig(init_timeout_seconds=timeout, train_timeout_seconds=timeout)


def _training(segment: Segment, micro_batch: int, world_size: int) -> TrainingConfig:
    assert segment.optimizer.grad_clip is not None, "the planner resolves the optimizer"
    pipelined = segment.parallel.pp > 1
    return TrainingConfig(
        local_batch_size=share_of_rank(segment, world_size=world_size) if pipelined else micro_batch,
        global_batch_size=segment.global_batch_size,
        seq_len=segment.sequence_length,
        max_norm=segment.optimizer.grad_clip,
        steps=segment.end_step,
        dtype="float32",
        mixed_precision_param=segment.precision.param,
        mixed_precision_reduce="float32",
        disable_cuda_graphs=True,
    )


def _further_model(
    segment: Segment,
    lifecycle: Lifecycle,
    parallelism: ParallelismConfig,
    role: str,
    spec: ModelSpec,
    *,
    dims: ParallelDims,
    device: torch.device,
) -> torch.nn.Module:
    """The frozen model of the checkpoint that is the input `role` of a segment, in the segment's layout."""
    return load_model(
        spec,
        lifecycle.checkpoint_of(role),
        sequence_length=segment.sequence_length,
        attention=attention_of(segment, spec).backend,
        parallelism=dataclasses.replace(parallelism, fsdp_reshard_after_forward="always"),
        dims=dims,
        device=device,
        dtype=segment.precision.param,
        stored_dtype=segment.precision.param,
        scratch=lifecycle.scratch,
        alone=dims.pp_enabled,
    ).requires_grad_(False)


def attention_of(segment: Segment, other: ModelSpec | None = None) -> Choice:
    """The attention backend of a segment in this process. `other`: another model that reads the same rows. If
    processes share a sequence, it gets the same masks, and so has the same backend. ValueError when the
    backend that the segment names, or that `other` must share, cannot run here."""
    model = segment.model if other is None else other
    setting = Setting.of(model, segment.precision.param, segment.parallel.cp, segment.sequence_length)
    same = other is not None and segment.parallel.cp > 1
    return resolve_backend(attention_of(segment).backend if same else segment.attention, setting)


def recomputation_config(segment: Segment) -> recomputed.ActivationCheckpointing.Config | None:
    """The config of what is recomputed in the backward pass; None for nothing."""
    match segment.activation_checkpointing:
        case "selective":
            return recomputed.SelectiveAC.Config()
        case "full":
            return recomputed.FullAC.Config()
        case "memory_budget":
            return recomputed.MemoryBudgetAC.Config(memory_budget=segment.memory_budget)
    return None


def debug_config(seed: int, *, deterministic: bool = True) -> DebugConfig:
    """A config with deterministic algorithms unless a stage asks for others, and without trace files."""
    return DebugConfig(seed=seed, deterministic=deterministic, enable_structured_logging=False)


def parallelism_config(
    parallel: Parallel, *, micro_batch_size: int = 1, n_layers: int = 0
) -> ParallelismConfig:
    """torchtitan's description of a layout. `micro_batch_size`: number of sequences that go through a
    pipeline at a time; `n_layers`: layers that a pipeline divides into stages."""
    return ParallelismConfig(
        data_parallel_replicate_degree=parallel.dp_replicate,
        data_parallel_shard_degree=parallel.dp_shard,
        fsdp_reshard_after_forward=parallel.reshard_after_forward,
        tensor_parallel_degree=parallel.tp,
        context_parallel_degree=parallel.cp,
        context_parallel_load_balancer=LOAD_BALANCERS[parallel.cp_load_balancer],
        pipeline_parallel_degree=parallel.pp,
        pipeline_parallel_microbatch_size=micro_batch_size,
        pipeline_parallel_schedule=PIPELINE_SCHEDULES[parallel.pp_schedule],
        module_fqns_per_model_part=stage_modules(n_layers, parallel.stages) if parallel.pp > 1 else None,
        enable_sequence_parallel=parallel.sequence_parallel,
        # the others fail on more than one process with torch 2.13: parameters are no DTensors on the mesh
        spmd_backend="partial_dtensor",
    )


def stage_modules(n_layers: int, stages: int) -> list[list[str]]:
    """Names of the model's parts in each pipeline stage."""
    names = (f"layers.{index}" for index in range(n_layers))
    modules = [list(islice(names, number)) for number in layout.stage_layers(n_layers, stages)]
    modules[0].insert(0, "tok_embeddings")
    modules[-1] += ["norm", "lm_head"]
    return modules


def share_of_rank(segment: Segment, *, world_size: int) -> int:
    """Number of sequences that each data-parallel rank has in a global batch. ValueError when the processes
    or the batch cannot be divided."""
    parallel = segment.parallel
    shared = parallel.tp * parallel.cp * parallel.pp
    if world_size % shared:
        raise ValueError(
            f"{world_size} processes cannot be divided into groups of tp {parallel.tp} x cp {parallel.cp} x"
            f" pp {parallel.pp}"
        )
    ranks = world_size // shared
    share, left = divmod(segment.global_batch_size, ranks)
    if left or not share:
        raise ValueError(
            f"a global batch of {segment.global_batch_size} sequences cannot be divided among {ranks}"
            " data-parallel processes; change the number of processes or the batch"
        )
    return share


def micro_batch_size(segment: Segment, *, world_size: int) -> int:
    """Sequences per forward pass and data-parallel rank: see `specs.layout.micro_batch_size`. ValueError when
    the batch cannot be divided among the processes, or the rank's share cannot be cut for a pipeline."""
    parallel, share = segment.parallel, share_of_rank(segment, world_size=world_size)
    share, left = divmod(share, segment.separate_gradients)
    if left:
        raise ValueError(
            f"a global batch of {segment.global_batch_size} sequences has not equally many of"
            f" {segment.separate_gradients} sources on every data-parallel process; change the number of"
            " processes or the batch"
        )
    size = layout.micro_batch_size(parallel, share, segment.micro_batch_size)
    if size is None:
        raise ValueError(
            f"{share} sequences per step and process cannot be cut for a pipeline of {parallel.stages} stages"
        )
    return size
