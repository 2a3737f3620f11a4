"""From a resolved segment to torchtitan's `Trainer.Config`.

Invariant: every number comes from the segment, except what says where and how (layout, micro-batch, folders),
which comes with it as its execution part. Combinations that cannot run are refused here, before anything is
built.
"""

from torchtitan.config import CommConfig, CompileConfig, DebugConfig, ParallelismConfig, TrainingConfig
from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC

from apertus_model.model.attention import resolve_backend
from apertus_model.model.model import model_config
from apertus_model.model.parallelize import refuse_unsupported, titan_model
from apertus_model.trainer.anomalies import AnomalyDetector
from apertus_model.trainer.checkpoint import StoreCheckpoints
from apertus_model.trainer.hang import HANG_SECONDS, SLOW_FACTOR
from apertus_model.trainer.loader import SampleLoader, TrainingData
from apertus_model.trainer.lr_scheduler import LearningRate
from apertus_model.trainer.metrics import Recorder, StepMetrics
from apertus_model.trainer.objectives import objective_of
from apertus_model.trainer.optimizer import optimizer_config
from apertus_model.trainer.trainer import ApertusTrainer, Lifecycle, NoTokenizer, OutputIsLoss
from specs import layout
from specs.errors import StageError
from specs.launch import Parallel
from specs.optimizer import refused_anomalies, refused_layout, refused_objective
from specs.stages.sft import SftSegment
from specs.stages.training import Segment

PIPELINE_SCHEDULES = {"1f1b": "1F1B", "gpipe": "GPipe", "interleaved-1f1b": "Interleaved1F1B"}
RECOMPUTATION = {"none": lambda: None, "selective": SelectiveAC.Config, "full": FullAC.Config}
COLLECTIVE_TIMEOUT_SECONDS = 1800  # where no training is watched


def trainer_config(
    segment: Segment, data: TrainingData, recorder: Recorder, lifecycle: Lifecycle, *, world_size: int
) -> ApertusTrainer.Config:
    """The complete configuration of one run.

    Args:
        segment: resolved part of a training stage.
        data: what the run trains on, and what it is measured on.
        recorder: receives its metrics.
        lifecycle: where it begins, where its checkpoints go, and what ends it.
        world_size: number of processes.

    Raises:
        StageError: the optimizer cannot train in this layout, or minimise this objective.
        ValueError: the layout does not fit the processes, or the batch, or the attention backend cannot run
            here.
    """
    assert segment.optimizer.name is not None, "the planner resolves the optimizer"
    name = segment.optimizer.name
    refused = refused_layout(name, segment.parallel, world_size) or refused_objective(name, segment.objective)
    if reason := refused or refused_anomalies(name, segment.anomalies):
        raise StageError(reason)
    micro_batch = micro_batch_size(segment, world_size=world_size)
    parallelism = parallelism_config(segment.parallel, micro_batch_size=micro_batch)
    attention = resolve_backend(
        segment.attention,
        param_dtype=segment.precision.param,
        context_parallel=segment.parallel.cp,
        sequence_length=segment.sequence_length,
    )
    objective = objective_of(segment)
    if segment.objective != "cross-entropy" and segment.parallel.pp > 1:
        raise ValueError(f"the objective {segment.objective!r} cannot run in a pipeline (pp: {segment.parallel.pp}); use another layout")
    # A rank that hangs is to say where, before the others give up waiting for it.
    collective_timeout = int(2 * SLOW_FACTOR * (lifecycle.watch.seconds if lifecycle.watch is not None else HANG_SECONDS))
    lora = segment.lora if isinstance(segment, SftSegment) else None
    model = model_config(segment.model, sequence_length=segment.sequence_length, attention=attention, seed=initial_seed(segment), lora=lora)
    assert segment.optimizer.grad_clip is not None, "the planner resolves the optimizer"
    return ApertusTrainer.Config(
        model_spec=titan_model(model),
        dump_folder=lifecycle.scratch,
        tokenizer=NoTokenizer.Config(),
        dataloader=SampleLoader.Config(
            samples=data.samples,
            first_sample=segment.sample_at,
            global_batch_size=segment.global_batch_size,
            fields=objective.fields,
        ),
        optimizer=optimizer_config(segment.optimizer, adapters_only=lora is not None),
        lr_scheduler=LearningRate.Config(
            rate=lambda steps_done: segment.schedule.lr(segment.tokens_at(max(steps_done, segment.start_step)))
        ),
        loss=OutputIsLoss.Config(),
        training=TrainingConfig(
            local_batch_size=share_of_rank(segment, world_size=world_size) if segment.parallel.pp > 1 else micro_batch,
            global_batch_size=segment.global_batch_size,
            seq_len=segment.sequence_length,
            max_norm=segment.optimizer.grad_clip,
            steps=segment.end_step,
            dtype="float32",
            mixed_precision_param=segment.precision.param,
            mixed_precision_reduce="float32",
            disable_cuda_graphs=True,
        ),
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
        activation_checkpoint=RECOMPUTATION[segment.activation_checkpointing](),
        compile=CompileConfig(enable=segment.compile),
        comm=CommConfig(init_timeout_seconds=collective_timeout, train_timeout_seconds=collective_timeout),
        metrics=StepMetrics.Config(
            disable_color_printing=True,
            recorder=recorder,
            tokens_at=segment.tokens_at,
            tokens_per_step=segment.tokens_per_step,
        ),
        debug=debug_config(segment.seed or 0),
        objective=objective,
        data=data,
        recorder=recorder,
        lifecycle=lifecycle,
        detector=AnomalyDetector(segment.anomalies, segment.start_step, lifecycle.anomalies),
        heldout_interval=segment.validation.interval if data.heldout else 0,
        save_seconds=segment.checkpoint.seconds,
    )


def initial_seed(segment: Segment) -> int:
    """Seed of the weights that no checkpoint gives: all of a new model; the adapters of a fine-tuned one, by
    the seed of its data."""
    if segment.seed is not None:
        return segment.seed
    return segment.data_seed if isinstance(segment, SftSegment) else 0


def debug_config(seed: int) -> DebugConfig:
    """Deterministic algorithms, and none of torchtitan's trace files."""
    return DebugConfig(seed=seed, deterministic=True, enable_structured_logging=False)


def parallelism_config(parallel: Parallel, *, micro_batch_size: int = 1) -> ParallelismConfig:
    """torchtitan's description of a layout. `micro_batch_size`: sequences that go through a pipeline at a
    time."""
    config = ParallelismConfig(
        data_parallel_replicate_degree=parallel.dp_replicate,
        data_parallel_shard_degree=parallel.dp_shard,
        tensor_parallel_degree=parallel.tp,
        context_parallel_degree=parallel.cp,
        context_parallel_load_balancer=None,
        pipeline_parallel_degree=parallel.pp,
        pipeline_parallel_microbatch_size=micro_batch_size,
        pipeline_parallel_schedule=PIPELINE_SCHEDULES[parallel.pp_schedule],
        enable_sequence_parallel=parallel.sequence_parallel,
        spmd_backend="partial_dtensor",
    )
    refuse_unsupported(config)
    return config


def share_of_rank(segment: Segment, *, world_size: int) -> int:
    """Sequences of a global batch that each data-parallel rank has.

    Raises:
        ValueError: the processes do not divide into the layout, or the global batch not among the processes.
    """
    parallel = segment.parallel
    shared = parallel.tp * parallel.cp * parallel.pp
    if world_size % shared:
        raise ValueError(f"{world_size} processes cannot be divided into groups of tp {parallel.tp} x cp {parallel.cp} x pp {parallel.pp}")
    ranks = world_size // shared
    share, left = divmod(segment.global_batch_size, ranks)
    if left or not share:
        raise ValueError(
            f"a global batch of {segment.global_batch_size} sequences cannot be divided among {ranks} data-parallel processes; "
            "change the number of processes or the batch"
        )
    return share


def micro_batch_size(segment: Segment, *, world_size: int) -> int:
    """Sequences per forward pass and data-parallel rank: see `specs.layout.micro_batch_size`.

    Raises:
        ValueError: as `share_of_rank`, or the rank's share cannot be cut for a pipeline.
    """
    parallel, share = segment.parallel, share_of_rank(segment, world_size=world_size)
    size = layout.micro_batch_size(parallel, share, segment.micro_batch_size)
    if size is None:
        raise ValueError(f"{share} sequences per step and process cannot be cut for a pipeline of {parallel.stages} stages")
    return size
