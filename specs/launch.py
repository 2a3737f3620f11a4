"""Where and how a stage runs: processes, threads, parallel layout. Execution only; nothing here enters a fingerprint."""

from __future__ import annotations

import re
from typing import Literal

from pydantic import field_validator, model_validator

from specs.base import Spec, execution
from specs.units import Duration

OUR_SBATCH_OPTIONS = frozenset(
    [
        *("array", "chdir", "cpus-per-task", "error", "export", "mem", "ntasks", "open-mode"),
        *("output", "parsable", "partition", "time", "wait", "wrap"),
    ]
)


class Parallel(Spec):
    """Degrees of parallelism; their product is the number of processes. `dp_shard: -1` takes what the others leave. A degree that the
    model, the sequence or the batch does not allow is refused before anything starts; see docs/parallelism.md."""

    dp_replicate: int = execution(1, ge=1, description="copies of the (sharded) weights")
    dp_shard: int = execution(-1, ge=-1, description="processes that share one copy of weights and optimizer states (FSDP)")
    tp: int = execution(1, ge=1, description="tensor parallelism: processes that share the heads and the feed-forward of every layer")
    cp: int = execution(1, ge=1, description="context parallelism: processes that share every sequence")
    pp: int = execution(
        1, ge=1, description="pipeline parallelism: processes that share the layers; micro_batch_size sequences go through it at a time"
    )
    pp_schedule: Literal["1f1b", "gpipe", "interleaved-1f1b"] = execution("1f1b")
    sequence_parallel: bool = execution(False, description="with tp: norms and residual stream are split along the sequence")

    @property
    def stages(self) -> int:
        """Pieces of the model that a sequence goes through, one after the other; `interleaved-1f1b` has two per process."""
        return self.pp * (2 if self.pp > 1 and self.pp_schedule == "interleaved-1f1b" else 1)


class Slurm(Spec):
    """How Slurm runs the tasks of a data stage: each is one task of a job array. What is not stated is left to the cluster's defaults."""

    partition: str | None = execution(None)
    time_limit: Duration | None = execution(None, description="of one task, rounded up to minutes")
    cpus: int = execution(1, ge=1, description="of one task")
    memory: str | None = execution(None, pattern=r"^[1-9]\d*[KMGT]$", description="of one task: `8G`")
    arguments: dict[str, str | int | bool] = execution(
        default_factory=dict, description="further options of `sbatch`: `{account: a123, exclusive: true}`"
    )

    @field_validator("arguments")
    @classmethod
    def _not_ours(cls, arguments: dict[str, str | int | bool]) -> dict[str, str | int | bool]:
        for name in arguments:
            if not re.fullmatch(r"[a-z][a-z0-9-]*", name):
                raise ValueError(f"'{name}' is no long option of sbatch; write 'account' for '--account'")
            if name in OUR_SBATCH_OPTIONS:
                raise ValueError(f"'{name}' is set by the stage, or has a field of its own; leave it out")
        return arguments


class Launch(Spec):
    """One launch. A stage's `launch:` replaces single fields of the pipeline's."""

    processes: int | None = execution(None, ge=1, description="training processes (one per GPU); 1 by default")
    threads: int | None = execution(
        None, ge=1, description="CPU threads per process, fixed since their number changes sums; 2 for one process, 1 for more, by default"
    )
    workers: int | None = execution(None, ge=1, description="worker processes of data stages; 2 by default")
    executor: Literal["local", "slurm"] | None = execution(
        None,
        description="what runs the tasks of corpus and conversations stages: processes of this machine (default) or Slurm",
    )
    slurm: Slurm | None = execution(None, description="for `executor: slurm`")
    parallel: Parallel | None = execution(None)
    mfu: float | None = execution(
        None, gt=0, le=1, description="model FLOPs utilisation that a plan expects here; by default what `cluster` says"
    )
    time_limit: Duration | None = execution(
        None, description="a stage that runs longer is stopped, with a checkpoint, and counts as failed"
    )

    def over(self, base: Launch) -> Launch:
        """Fields stated here win over those of `base`."""
        stated = {name: value for name in type(self).model_fields if (value := getattr(self, name)) is not None}
        return base.model_copy(update=stated)

    @property
    def world_size(self) -> int:
        return self.processes or 1

    @property
    def data_parallel(self) -> int:
        """Number of data-parallel ranks: each sees different samples of a global batch."""
        parallel = self.parallel or Parallel()
        return self.world_size // (parallel.tp * parallel.cp * parallel.pp)

    @property
    def mismatch(self) -> str | None:
        """Why the degrees do not make the number of processes."""
        parallel, processes = self.parallel or Parallel(), self.world_size
        fixed = parallel.tp * parallel.cp * parallel.pp * parallel.dp_replicate
        shard = parallel.dp_shard if parallel.dp_shard > 0 else processes // fixed
        if fixed * shard == processes:
            return None
        return (
            f"tp {parallel.tp} x cp {parallel.cp} x pp {parallel.pp} x dp_replicate {parallel.dp_replicate} x dp_shard {parallel.dp_shard} "
            f"does not make {processes} processes; the product must be equal to it"
        )

    @model_validator(mode="after")
    def _layout_fits(self) -> Launch:
        if self.parallel is not None and self.processes is not None and (mismatch := self.mismatch) is not None:
            raise ValueError(mismatch)
        return self


class Retries(Spec):
    """Repetition of a stage that failed for a reason worth another try (a crash, storage), never for a bad spec or a failed gate."""

    attempts: int = execution(2, ge=0, description="further attempts after the first")
    backoff: Duration = execution(Duration(5.0), description="wait before the first retry; doubles each time")


class Checkpointing(Spec):
    """When a training stage saves, and how many of its checkpoints are kept beside the last of each segment."""

    interval: int = execution(100, ge=1, description="optimizer steps between checkpoints")
    keep: int = execution(2, ge=1, description="latest checkpoints kept; the end of a segment is always kept")
    milestones: list[int] = execution(default_factory=list, description="steps of the stage whose checkpoints are kept for good")
    best: list[str] = execution(
        default_factory=list,
        description="metrics whose best checkpoint is kept: val_loss, val_loss/<source>; what `@best:` asks for is added",
    )


class Validation(Spec):
    """Loss on held-out sequences of every source of the mixture while training."""

    interval: int = execution(100, ge=0, description="optimizer steps between validations; 0 switches it off")
    samples: int = execution(16, ge=1, description="sequences per source")
