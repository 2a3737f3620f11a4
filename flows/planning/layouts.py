"""Finds the layouts in which a part of a training stage could run on a number of GPUs, the fastest first.

Layouts are enumerated and pruned by the rules of a recipe's checks (`specs.layout`), and by two more: tensor
parallelism stays inside a node, and each rank has at least `LEAST_TOKENS` of a sequence. The remaining
layouts are ranked by their time in `flows.planning.estimate.step_time`.

Invariant: a layout changes the speed of a part and its memory, never its batch or its result.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import Any, Literal

from apertus_model.rehearsal.rates import Rates
from flows.planning.estimate import step_time
from flows.planning.estimate.memory import memory_of_step
from specs.capabilities import OBJECTIVES, SPARSE_BLOCK
from specs.errors import FieldPath
from specs.launch import Launch, Parallel
from specs.layout import micro_batch_size, misfits
from specs.optimizer import refused_layout
from specs.stages.training import Segment

LEAST_TOKENS = 2048  # tokens of a sequence on each rank that shares it
LARGEST_MICRO_BATCH = 16  # sequences
# schedules with their stages per process; gpipe idles as long as 1f1b and keeps more activations
SCHEDULES: tuple[tuple[Literal["1f1b", "interleaved-1f1b"], int | None], ...] = (
    ("1f1b", None), *(("interleaved-1f1b", stages) for stages in (2, 3, 4, 5, 6, 8)),
)  # fmt: skip
RECOMPUTATION = ("none", "selective", "full")
WITHOUT_SHARING = ("varlen", "flash")  # attention backends with which ranks cannot share a sequence


@dataclass(frozen=True)
class Layout:
    """A segment with a layout on a number of GPUs."""

    segment: Segment
    processes: int
    rates: Rates

    @property
    def parallel(self) -> Parallel:
        return self.segment.parallel

    @property
    def kind(self) -> tuple[Any, ...]:
        """A key that is equal for layouts that differ only in copies of weights, virtual stages, micro-batch
        size and recomputation."""
        parallel = self.parallel
        return parallel.tp, parallel.sequence_parallel, parallel.cp, parallel.pp, parallel.pp_schedule

    @cached_property
    def seconds(self) -> float:
        return step_time.of_step(self.segment, self.processes, self.rates).total

    @property
    def tokens_per_second_per_gpu(self) -> float:
        return self.segment.tokens_per_step / self.seconds / self.processes

    @cached_property
    def memory(self) -> float:
        """The peak memory of a GPU in bytes, as a plan estimates it."""
        return memory_of_step(self.segment, self.processes).total

    @property
    def launch(self) -> dict[str, Any]:
        """The `launch:` of the stage, with every field of `parallel` stated."""
        parallel = self.parallel.to_json() | {"dp_shard": self.dp_shard}
        return {"processes": self.processes, "parallel": parallel}

    @property
    def dp_shard(self) -> int:
        parallel = self.parallel
        fixed = parallel.tp * parallel.cp * parallel.pp * parallel.dp_replicate
        return self.processes // fixed

    @property
    def settings(self) -> dict[str, Any]:
        """The fields that a layout sets besides `launch`."""
        return {
            "micro_batch_size": self.segment.micro_batch_size,
            "activation_checkpointing": self.segment.activation_checkpointing,
        }

    def overrides(self, path: FieldPath) -> list[str]:
        """The settings in the form that `--set` takes, float8 included. `path`: that of the phase, see
        `specs.stages.training.Phase`."""
        stage, phase = ".".join(map(str, path[:2])), ".".join(map(str, path))
        assignments = [f"{stage}.launch.{name}={flow(value)}" for name, value in self.launch.items()]
        if (linear := self.segment.precision.linear) != "param":
            assignments.append(f"{stage}.precision.linear={linear}")
        return assignments + [f"{phase}.{name}={flow(value)}" for name, value in self.settings.items()]

    def to_yaml(self, path: FieldPath) -> str:
        """The settings as YAML to paste under a recipe. Settings of one of several steps cannot be stated
        apart from the step, and become comments."""
        stage, step = str(path[1]), path[2:]
        settings = [f"{name}: {value}" for name, value in self.settings.items()]
        if step:
            settings = [f"# {'.'.join(map(str, step))}.{line}" for line in settings]
        lines = [*settings, f"launch: {flow(self.launch)}"]
        return "\n".join(["stages:", f"  {stage}:", *(f"    {line}" for line in lines)]) + "\n"


def flow(value: Any) -> str:
    """A value as YAML on one line."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{name}: {flow(item)}" for name, item in value.items()) + "}"
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)


def layouts(segment: Segment, processes: int, rates: Rates) -> list[Layout]:
    """All layouts of a segment, the fastest first; an empty list if the batch cannot be divided."""
    every = [
        Layout(
            segment.model_copy(
                update={"parallel": parallel, "micro_batch_size": size, "activation_checkpointing": again}
            ),
            processes,
            rates,
        )
        for parallel in _degrees(segment, processes, rates.gpus_per_node)
        for size in _micro_batches(segment, parallel, processes)
        for again in _recomputation(segment, parallel)
    ]
    return sorted(every, key=lambda layout: layout.seconds)


def _degrees(segment: Segment, processes: int, gpus_per_node: int) -> Iterator[Parallel]:
    """Yields the degrees that model, sequence, batch, optimizer and attention allow. Other settings are the
    recipe's."""
    assert segment.optimizer.name is not None, "the planner resolves the optimizer"
    own = segment.parallel
    whole = OBJECTIVES[segment.objective].pipeline_obstacle
    stages = [1] if whole else _divisors(processes, segment.model.n_layers)
    for tp, cp, pp in product(_divisors(processes, gpus_per_node), _cp(segment, processes), stages):
        ranks, left = divmod(processes, tp * cp * pp)
        each = ranks * segment.separate_gradients
        if left or not ranks or gpus_per_node % tp or segment.global_batch_size % each:
            continue
        schedules = SCHEDULES if pp > 1 else SCHEDULES[:1]
        for split, (schedule, virtual) in product((False, True)[:tp], schedules):
            degrees = {"tp": tp, "cp": cp, "pp": pp, "pp_schedule": schedule, "virtual_stages": virtual}
            flags = {"sequence_parallel": split, "async_tp": own.async_tp and split}
            layout = own.model_copy(update={**degrees, **flags, "dp_shard": -1, "dp_replicate": 1})
            launch = Launch(processes=processes, parallel=layout)
            if any(misfits(launch, segment.model, segment.sequence_length, segment.global_batch_size)):
                continue
            for copies in _divisors(ranks, ranks):
                copied = layout.model_copy(update={"dp_replicate": copies})
                if refused_layout(segment.optimizer.name, copied, processes) is None:
                    yield copied


def _cp(segment: Segment, processes: int) -> list[int]:
    if segment.attention in WITHOUT_SHARING:
        return [1]
    length = segment.sequence_length
    return [
        cp
        for cp in _divisors(processes, max(1, length // LEAST_TOKENS))
        if cp == 1 or length % (SPARSE_BLOCK * cp) == 0  # masks have whole blocks on every rank
    ]


def _micro_batches(segment: Segment, parallel: Parallel, processes: int) -> list[int]:
    ranks = processes // (parallel.tp * parallel.cp * parallel.pp)
    share = segment.global_batch_size // (ranks * segment.separate_gradients)
    sizes = (micro_batch_size(parallel, share, size) for size in _divisors(share, LARGEST_MICRO_BATCH))
    return sorted({size for size in sizes if size is not None})


def _recomputation(segment: Segment, parallel: Parallel) -> tuple[str, ...]:
    """The kinds of recomputation to try: layers with recomputation cannot be compiled under tensor
    parallelism (`specs.checks`)."""
    return RECOMPUTATION[:1] if segment.compile and parallel.tp > 1 else RECOMPUTATION


def _divisors(number: int, most: int) -> list[int]:
    return [divisor for divisor in range(1, min(number, most) + 1) if number % divisor == 0]
