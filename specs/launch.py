"""Settings of where and how a stage runs: processes, threads, parallel layout. All are execution fields;
nothing here enters a fingerprint."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import BeforeValidator, Field, field_validator

from specs.base import Spec, execution
from specs.foreign import shown
from specs.units import HELD_OUT, Duration, PositiveDuration

MOST_PROCESSES = 2**20  # of a launch; no cluster has as many GPUs
MOST_THREADS = 4096  # threads or processes of one machine


def not_kubernetes(value: Any) -> Any:
    if value == "kubernetes":
        raise ValueError("'kubernetes' is gone; write 'ray', for a cluster as infra/kuberay/raycluster.yaml")
    return value


Executor = Annotated[Literal["local", "slurm", "ray"], BeforeValidator(not_kubernetes)]


class Parallel(Spec):
    """Degrees of parallelism; their product is the number of processes. A degree that the model, the sequence
    or the batch does not allow is refused before anything starts; see docs/parallelism.md."""

    dp_replicate: int = execution(1, ge=1, le=MOST_PROCESSES, description="copies of the (sharded) weights")
    dp_shard: int = execution(
        -1,
        ge=-1,
        le=MOST_PROCESSES,
        description="processes that share one copy of weights and optimizer states (FSDP); -1: the processes"
        " that the other degrees leave",
    )
    reshard_after_forward: Literal["default", "always", "never"] = execution(
        "default",
        description="whether FSDP drops the gathered weights of a layer after its forward pass, and gathers"
        " them again for the backward pass; default: always, but never in a pipeline",
    )
    tp: int = execution(
        1,
        ge=1,
        le=MOST_PROCESSES,
        description="tensor parallelism: processes that share the heads and the feed-forward of every layer",
    )
    cp: int = execution(
        1, ge=1, le=MOST_PROCESSES, description="context parallelism: processes that share every sequence"
    )
    cp_load_balancer: Literal["none", "head-tail"] = execution(
        "none",
        description="which slices of a sequence a context-parallel process has; none: one piece; head-tail:"
        " one from each end, so that causal attention is as much work for each, which `attention: flex` can"
        " use",
    )
    pp: int = execution(
        1,
        ge=1,
        le=MOST_PROCESSES,
        description="pipeline parallelism: processes that share the layers; micro_batch_size sequences go"
        " through it at a time",
    )
    pp_schedule: Literal["1f1b", "gpipe", "interleaved-1f1b"] = execution("1f1b")
    virtual_stages: int | None = execution(
        None,
        ge=2,
        le=1000,
        description="pipeline stages of each process with interleaved-1f1b, 2 by default; more of them"
        " shorten the idle time, and pass states on more often",
    )
    sequence_parallel: bool = execution(
        False, description="with tp: splits norms and residual stream along the sequence"
    )
    async_tp: bool = execution(
        False,
        description="with sequence_parallel and compile, on GPUs of one node: lets matrix products begin"
        " before the gather of their input has ended, and send their result while they compute",
    )

    @field_validator("dp_shard")
    @classmethod
    def _shares(cls, processes: int) -> int:
        if processes == 0:
            raise ValueError("0 processes hold no weights; set 1 or more, or -1 for all that are left")
        return processes

    @property
    def reshards(self) -> bool:
        """Whether gathered weights are dropped after a forward pass."""
        return self.reshard_after_forward == "always" or (
            self.reshard_after_forward == "default" and self.pp == 1
        )

    @property
    def stages(self) -> int:
        """The number of pipeline stages of the model; `interleaved-1f1b` has several per process."""
        several = self.pp > 1 and self.pp_schedule == "interleaved-1f1b"
        return self.pp * ((self.virtual_stages or 2) if several else 1)

    @property
    def without_pipeline(self) -> Parallel:
        """The layout in which the processes of a pipeline share weights instead."""
        return self.model_copy(
            update={"pp": 1, "pp_schedule": "1f1b", "virtual_stages": None, "dp_shard": -1}
        )


class Workers(Spec):
    """The processes that share the units of a stage: tasks of a corpus, ranges of prompts or of a suite's
    requests. Each has launch.parallel.tp GPUs where a whole model answers, and one GPU where a model scores.
    The profile (specs/profiles.py) says where they run on a cluster."""

    count: int | None = execution(
        None,
        ge=1,
        le=MOST_THREADS,
        description="workers at the same time; by default as many as GPUs allow on this machine (without"
        " GPUs 2 for corpora and conversations, else 1), and on a cluster as many as it runs",
    )
    units_per_job: int = execution(
        1, ge=1, description="on a cluster: number of units of each worker, over which a model stays loaded"
    )
    time_limit: PositiveDuration | None = execution(
        None, description="on a cluster: time limit of each worker, rounded up to minutes on Slurm"
    )
    cpus: int | None = execution(
        None,
        ge=1,
        le=MOST_THREADS,
        description="on a cluster: CPUs of each worker; 1 by default, or those of the profile for a worker"
        " with GPUs",
    )
    memory: str | None = execution(
        None, pattern=r"^[1-9]\d*[KMGT]$", description="on a cluster: memory of each worker, such as `8G`"
    )

    @property
    def memory_bytes(self) -> int | None:
        """`memory` in bytes."""
        if self.memory is None:
            return None
        return int(self.memory[:-1]) * 1024 ** (1 + "KMGT".index(self.memory[-1]))


class HeldModel(NamedTuple):
    """A whole model that a process holds outside the training engine: to sample, to score or to run tasks."""

    role: str  # among the inputs of the part
    vllm: bool = False
    shared: bool = False  # its layers are divided among `launch.parallel.tp` GPUs of a node


class Launch(Spec):
    """The settings of a launch. Fields of a stage's `launch:` replace those of the pipeline's."""

    processes: int | None = execution(
        None, ge=1, le=MOST_PROCESSES, description="training processes (one per GPU); 1 by default"
    )
    threads: int | None = execution(
        None,
        ge=1,
        le=MOST_THREADS,
        description="CPU threads per process, fixed since their number changes sums; 2 for one process, 1"
        " for more, by default",
    )
    executor: Executor | None = execution(
        None,
        description="where the workers run that share the units of corpora, conversations, sampling, scoring"
        " and suites of tasks: this machine, or the node of the stage (default); a Slurm job array;"
        " actors of a Ray cluster",
    )
    workers: Workers | None = execution(None)
    parallel: Parallel | None = execution(None)
    mfu: float | None = execution(
        None,
        gt=0,
        le=1,
        description="model FLOPs utilisation that a plan expects here; that of `cluster` by default",
    )
    time_limit: PositiveDuration | None = execution(
        None,
        description="a stage that runs longer is stopped, with a checkpoint, and counts as failed",
    )
    hang_timeout: PositiveDuration | None = execution(
        None,
        description="training that makes no step for this long is ended, with the stacks of all its threads"
        " in the log, and retried; 30 min by default, three times as long before the first step, during"
        " validation and while it waits for a checkpoint",
    )
    stop_before_end: Duration | None = execution(
        None,
        description="training commits a checkpoint and ends as interrupted this long before the end of its"
        " job, which APERTUS_JOB_END or SLURM_JOB_END_TIME states (unix time); also the least time that a"
        " stage has for a checkpoint when it is told to stop",
    )

    def over(self, base: Launch) -> Launch:
        """The settings of `base`, with the fields stated here in place of its own."""
        return base.model_copy(update=self.stated())

    @property
    def world_size(self) -> int:
        return self.processes or 1

    @property
    def cpu_threads(self) -> int:
        """`threads`, or the default for the number of processes."""
        return self.threads or max(1, 2 // self.world_size)

    @property
    def degrees(self) -> Parallel:
        """The degrees by which a model and its batch are divided."""
        return self.parallel or Parallel()

    @property
    def tensor_parallel(self) -> int:
        """Number of GPUs that share every layer; for a part that samples or scores with a whole model, its
        number of GPUs on a node."""
        return self.degrees.tp

    @property
    def worker_count(self) -> int | None:
        return self.workers.count if self.workers is not None else None

    def workers_of_node(self, gpus: int, each: int) -> int:
        """The number of workers of a part that is one process on `gpus` GPUs, of which each worker takes
        `each`: as many as stated, else as many as fit."""
        return self.worker_count or max(1, gpus // each)

    @property
    def data_parallel(self) -> int:
        """Number of data-parallel ranks: each sees different samples of a global batch."""
        parallel = self.degrees
        return self.world_size // (parallel.tp * parallel.cp * parallel.pp)

    @property
    def mismatch(self) -> str | None:
        """Why the product of the degrees is not the number of processes; None if it is."""
        parallel, processes = self.degrees, self.world_size
        fixed = parallel.tp * parallel.cp * parallel.pp * parallel.dp_replicate
        shard = parallel.dp_shard if parallel.dp_shard > 0 else processes // fixed
        if fixed * shard == processes:
            return None
        return (
            f"tp {parallel.tp} x cp {parallel.cp} x pp {parallel.pp} x dp_replicate {parallel.dp_replicate} x"
            f" dp_shard {parallel.dp_shard} does not make {processes} processes; the product must be equal"
            " to it"
        )

    def conflicts(self) -> Iterator[str]:
        if (
            self.parallel is not None
            and self.processes is not None
            and (mismatch := self.mismatch) is not None
        ):
            yield mismatch


LONGEST_WAIT = 600.0  # seconds


class Retries(Spec):
    """Retries of a stage after a crash or a failure of storage, never after a bad spec or a failed gate. An
    attempt that committed something before it failed resets the count."""

    attempts: int = execution(2, ge=0, le=1000, description="retries after an attempt that committed nothing")
    backoff: Duration = execution(
        Duration(5.0),
        description="wait before the first retry; doubles each time, up to ten minutes",
    )

    def wait(self, before: int) -> float:
        """The seconds to wait before a retry that follows `before` others."""
        return min(self.backoff.seconds * 2.0 ** min(before, 30), max(self.backoff.seconds, LONGEST_WAIT))


def _steps_or_time(value: Any) -> Any:
    if isinstance(value, int) and not isinstance(value, bool) and value >= 1:
        return value
    try:
        duration = Duration.parse(value)
    except ValueError:
        duration = Duration(0.0)
    if duration.seconds <= 0:
        raise ValueError(
            f"{shown(value)} is not an interval; write steps, such as 100, or a time, such as '30min'"
        )
    return duration


class Checkpointing(Spec):
    """The settings of when a training stage saves, and of how many checkpoints are kept besides the last of
    each segment. A checkpoint that another artifact or the next step of a run starts from is always kept."""

    interval: Annotated[Annotated[int, Field(ge=1)] | Duration, BeforeValidator(_steps_or_time)] = execution(
        100, description="interval between checkpoints: optimizer steps, or a time such as `30min`"
    )
    keep: int = execution(2, ge=1, description="latest checkpoints kept, also after a segment has finished")
    keep_every: int | None = execution(
        None,
        ge=1,
        description="checkpoints at multiples of this many steps of the stage are made and kept",
    )
    milestones: list[Annotated[int, Field(ge=1)]] = execution(
        default_factory=list,
        description="steps of the stage at which checkpoints are made and kept for good",
    )
    best: list[Annotated[str, Field(pattern=f"^{HELD_OUT}$")]] = execution(
        default_factory=list,
        description="metrics whose best checkpoint is kept: val_loss, val_loss/<source>; metrics in `@best:`"
        " references are added",
    )

    def due(self, step: int) -> bool:
        """Whether a checkpoint is made at this step, regardless of time."""
        every = [number for number in (self.interval, self.keep_every) if isinstance(number, int)]
        return step in self.milestones or any(step % number == 0 for number in every)

    @property
    def seconds(self) -> float | None:
        """The seconds between checkpoints; None if the interval is in steps."""
        return self.interval.seconds if isinstance(self.interval, Duration) else None

    def kept(self, step: int) -> bool:
        """Whether the checkpoint of this step is kept for good."""
        return step in self.milestones or (self.keep_every is not None and step % self.keep_every == 0)


class Validation(Spec):
    """Settings of the loss on held-out sequences of every source of the mixture during training."""

    interval: int = execution(100, ge=0, description="optimizer steps between validations; 0 switches it off")
    samples: int = execution(16, ge=1, description="sequences per source")
