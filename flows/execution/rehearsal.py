"""Rehearses the parts of a plan that train, in a process for each rank, and compares them with the plan.

Invariant: nothing is stored, and neither torch nor Prefect is loaded in this process.
"""

import contextlib
import os
import signal
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, Literal

from apertus_model.rehearsal import fake_cuda
from apertus_model.rehearsal.records import PartResult, RankFailure, RankReport, RankResult, RankTask
from flows.planning.estimate import flops
from flows.planning.estimate.memory import memory_of_rank
from flows.planning.estimate.sizes import layers_of_rank, micro_batches_of
from flows.planning.estimate.step_time import bubble
from flows.planning.estimate.training import PartEstimate
from infra.launchers.warm import ServerLost, kept_server
from infra.store.scratch import temporary_folder
from specs.base import Strict
from specs.cluster import GPUS
from specs.errors import StageError
from specs.layout import micro_batches_in_flight
from specs.stages.training import Segment

RANK, SERVER = "apertus_model.rehearsal.__main__", "apertus_model.rehearsal.server"
PREPARE_SECONDS = 600.0  # a server imports torchtitan before it answers, and nothing else can start a rank
Ranks = Literal["first, middle and last", "all kinds"]
# fields of a segment that say where it begins and ends, what it reads and what it saves, but not what a step
# does; labels that Goldfish leaves out are trained in a rehearsal, too
UNRELATED = (
    "start_step", "start_tokens", "end_step", "sample_offset", "excluded", "seed", "carry", "schedule",
    "source_names", "goldfish", "checkpoint", "validation",
)  # fmt: skip


class Rehearsal(Strict):
    """The output of `apertus rehearse --json`."""

    pipeline: str
    parts: list[PartResult]

    @property
    def builds(self) -> bool:
        return not any(part.failures for part in self.parts)


def rehearse(
    part: PartEstimate,
    gpu: str,
    gpus_per_node: int,
    ranks: Ranks | int | list[int],
    begins: Callable[[int], None] = lambda rank: None,
    known: dict[str, RankReport] | None = None,
    fused_norms: bool = True,
) -> PartResult:
    """Rehearses ranks of a part. StageError when there is no such GPU or rank, or no rehearsal is possible.

    Args:
        begins: called with the number of each rank before its rehearsal.
        known: reports of finished tasks, by `work_of`; those of this part are added. Segments of a stage
            often differ in their first and last steps alone.
    """
    segment, world = part.segment, part.gpus
    check_gpu(gpu)
    known = {} if known is None else known
    tasks = [
        RankTask(
            kind=part.node.kind,
            segment=segment.model_dump(mode="json"),
            world_size=world,
            rank=rank,
            gpu=gpu,
            gpus_per_node=gpus_per_node,
            fused_norms=fused_norms,
        )
        for rank in ranks_of(segment, world, ranks)
    ]
    works = [work_of(task) for task in tasks]
    missing = {work: task for work, task in zip(works, tasks, strict=True) if work not in known}
    known |= zip(missing, run_ranks([*missing.values()], begins), strict=True)
    results = [_beside_plan(segment, world, known[work]) for work in works]
    built = [rank.report.rehearsed for rank in results if rank.report.rehearsed is not None]
    idle = max((bubble(segment.parallel, rank.micro_batches) for rank in built), default=0.0)
    longest = max((rank.seconds for rank in built), default=0.0)
    step = longest * (1 + idle) if built and len(built) == len(results) else None
    return PartResult(
        stage=part.node.stage,
        part=part.node.name,
        gpus=world,
        gpu=gpu,
        ranks=results,
        bubble=idle,
        step_seconds=step,
        tokens_per_second_per_gpu=segment.tokens_per_step / step / world if step else None,
    )


def work_of(task: RankTask) -> str:
    """The work of a task as text: equal for tasks whose steps do the same, whatever their learning rate."""
    segment = {name: value for name, value in task.segment.items() if name not in UNRELATED}
    optimizer = {name: value for name, value in segment["optimizer"].items() if name != "lr"}
    return task.model_copy(update={"segment": segment | {"optimizer": optimizer}}).model_dump_json()


def check_gpu(gpu: str) -> None:
    """Raises StageError for a GPU without a data sheet."""
    if gpu not in GPUS:
        raise StageError(f"there is no data sheet of a GPU {gpu!r}. Fix: use one of {', '.join(GPUS)}")


def ranks_of(segment: Segment, world: int, ranks: Ranks | int | list[int]) -> list[int]:
    """The ranks to rehearse.

    `first, middle and last`: a rank of the first and of the last stage of a pipeline, and of the middle stage
    that waits for most micro-batches. `all kinds`: also ranks with other layers or other micro-batches in
    flight and, where FSDP cuts a tensor into unequal parts, the last rank of a group. StageError for a number
    that is no rank."""
    parallel = segment.parallel
    if isinstance(ranks, list):
        return ranks
    if isinstance(ranks, int):
        if not 0 <= ranks < world:
            there = f"the part has {world} processes, from 0 to {world - 1}"
            raise StageError(f"there is no rank {ranks}: {there}")
        return [ranks]
    pp, each = parallel.pp, world // parallel.pp
    stages = sorted({0, min(1, pp - 1), pp - 1})
    if ranks == "all kinds":
        kinds = {_kind(segment, world, stage): stage for stage in reversed(range(pp))}
        stages = sorted(kinds.values())
    first = [stage * each for stage in stages]
    shards = each // parallel.tp // parallel.dp_replicate
    if ranks == "all kinds":
        # first axes of the parameters of a tensor-parallel rank, along which FSDP cuts them
        model = segment.model
        split = (model.query_dim, model.key_dim, model.ffn_dim, model.vocab_size)
        axes = [*(size // parallel.tp for size in split), model.dim, model.head_dim, 1]
        if any(size % shards for size in axes):
            first += [rank + (shards - 1) * parallel.tp for rank in first]
    return sorted(set(first))


def _kind(segment: Segment, world: int, stage: int) -> tuple[Any, ...]:
    """A key that is equal for stages of a pipeline whose ranks do the same work."""
    parallel = segment.parallel
    layers = layers_of_rank(segment.model.n_layers, parallel.stages, parallel.pp, stage)
    _, micro_batches = micro_batches_of(segment, world)
    waiting = micro_batches_in_flight(parallel, stage, micro_batches)
    return stage == 0, stage == parallel.pp - 1, *layers, *waiting


def _beside_plan(segment: Segment, world: int, report: RankReport) -> RankResult:
    stage = report.rank // (world // segment.parallel.pp)
    planned = memory_of_rank(segment, world, stage).to_json()
    operations = flops.of_rank(segment, world, stage)
    rehearsed = report.rehearsed
    return RankResult(
        rank=report.rank,
        pipeline_rank=stage,
        planned_memory=planned,
        memory_difference=planned["total"] / rehearsed.memory.total - 1 if rehearsed is not None else None,
        planned_flops=operations,
        flops_ratio=sum(rehearsed.flops.values()) / operations if rehearsed is not None else None,
        report=report,
    )


def run_ranks(tasks: list[RankTask], begins: Callable[[int], None] = lambda rank: None) -> list[RankReport]:
    """Rehearses ranks, each in its own process, as many at a time as cores, or raises StageError."""
    reports, running = list[RankReport](), deque[Callable[[], RankReport]]()
    with contextlib.ExitStack() as started:
        for task in tasks:
            if len(running) == len(os.sched_getaffinity(0)):
                reports.append(running.popleft()())
            begins(task.rank)
            running.append(started.enter_context(_begun(task)))
        return reports + [report() for report in running]


@contextlib.contextmanager
def _begun(task: RankTask) -> Iterator[Callable[[], RankReport]]:
    """Starts the process of a rank, and yields a function that waits for its report; kills it at the end."""
    try:
        if task.device == "cuda":
            fake_cuda.compile_once()
    except fake_cuda.NoFakeCuda as error:
        raise StageError(str(error)) from error
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}  # a real GPU would be found beside the fake one
    with temporary_folder("rehearsal") as folder:
        question, answer = folder / "task.json", folder / "report.json"
        question.write_text(task.model_dump_json())
        server = kept_server(environment, SERVER, [task.device, task.gpu])
        try:
            process = server.start(RANK, [str(question), str(answer)], environment, seconds=PREPARE_SECONDS)
        except ServerLost as error:
            why = f"it did not start, by python -m {SERVER} {task.device} {task.gpu}: {error}"
            yield lambda: _failed(task, why)
            return

        def report() -> RankReport:
            lines = process.stdout.read().decode(errors="replace").splitlines()
            code = process.wait()
            if answer.exists():
                return RankReport.model_validate_json(answer.read_text())
            last = next((line for line in reversed(lines) if line.strip()), "")
            return _failed(task, f"its process ended with code {code}: {last}")

        with process.stdin, process.stdout:
            try:
                yield report
            finally:
                if process.poll() is None:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(process.pid, signal.SIGKILL)  # it may not lead its group yet


def _failed(task: RankTask, why: str) -> RankReport:
    return RankReport(rank=task.rank, failure=RankFailure(error=why, place=""))


def parts_to_rehearse(parts: list[PartEstimate], stage: str | None, number: int | None) -> list[PartEstimate]:
    """The parts to rehearse; `number` chooses one of a stage's, from 0. StageError if there is none."""
    names = list(dict.fromkeys(part.node.stage for part in parts))
    if stage is not None and stage not in names:
        fix = f"use one of {', '.join(names) or 'none'}"
        raise StageError(f"no stage {stage!r} trains in this recipe. Fix: {fix}")
    if number is not None and stage is None:
        raise StageError(f"--part {number} says which part of a stage. Fix: name the stage before it")
    chosen = [part for part in parts if stage in (None, part.node.stage)]
    if number is not None:
        if not 0 <= number < len(chosen):
            raise StageError(f"stage {stage!r} has no part {number}. Fix: use 0 to {len(chosen) - 1}")
        chosen = [chosen[number]]
    return chosen
