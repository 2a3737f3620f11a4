"""The task of a rehearsal and its report, as JSON between processes; neither torch nor numpy is loaded.

Bytes are whole numbers; seconds are predicted.
"""

from typing import Any, Literal

from specs.base import Strict

KINDS = ("weights", "gradients", "optimizer_states", "activations", "communication", "other")
PAIRS = 4  # per row of preference data: about as many as the published recipes have
OPERATORS = ("matrix", "attention", "memory")  # kinds of operators
HIDDEN = ("fsdp", "dp_replicate")  # meshes whose collectives run beside computation


class RankTask(Strict):
    """The rehearsal of one rank of one part."""

    kind: str  # of the stage
    segment: dict[str, Any]
    world_size: int
    rank: int
    gpu: str
    gpus_per_node: int
    # cuda: FakeTensors on a fake CUDA. cpu: real tensors on the CPU, for tiny shapes
    device: Literal["cuda", "cpu"] = "cuda"
    fused_norms: bool = True  # RMSNorm is one kernel; false: several, as before torch 2.8


class Tensors(Strict):
    """The tensors at the peak that have the same operator, shape, dtype and kind."""

    operator: str  # that made them
    shape: tuple[int, ...]
    dtype: str
    kind: str  # of `KINDS`
    number: int
    bytes: int  # of all these tensors


class Moment(Strict):
    """The bytes that live at one time of the step."""

    seconds: float  # of computation since its begin
    kinds: tuple[int, ...]  # in the order of `KINDS`


class PeakMemory(Strict):
    """Bytes at the peak of the step."""

    total: int
    kinds: dict[str, int]  # by `KINDS`
    largest: list[Tensors]
    moments: list[Moment]  # of the whole step: the fullest moment of each piece of its time


class Collectives(Strict):
    """The collectives of a step that have the same kind, mesh and number of ranks."""

    kind: str  # all-gather, reduce-scatter, all-reduce, send, receive, ...
    mesh: str  # dimension of the mesh: fsdp, tp, cp, pp, ...
    ranks: int  # of the group
    calls: int
    bytes: int  # of the whole tensors, summed over calls
    asynchronous: int  # calls that do not wait
    seconds: float
    hidden_seconds: float = 0.0  # the part of `seconds` beside a product that async_tp divides


class Synchronisation(Strict):
    """A line of code at which the host waits for the GPU."""

    place: str  # file:line of this project, or of torchtitan
    what: str  # item, tolist, nonzero, copy
    calls: int


class Operators(Strict):
    """The calls of one operator in a step."""

    kind: str  # matrix, attention, memory
    operator: str
    calls: int
    flops: int
    bytes: int  # read and written
    seconds: float


class Rehearsed(Strict):
    """The costs of a rank's step."""

    attention: str  # the backend, and why
    layers: list[str]  # of this rank
    micro_batches: int
    memory: PeakMemory
    collectives: list[Collectives]
    flops: dict[str, int]  # matrix, attention
    synchronisations: list[Synchronisation]
    operators: list[Operators]  # longest first
    kinds: dict[str, float]  # seconds of all operators by kind: matrix, attention, memory
    classes: dict[str, float]  # the same seconds by what operators are for, see `classes`
    bound: float  # fraction of the GPU's peak, see `Rates.bound`
    compute_seconds: float  # the sum of `kinds`, and of `classes`
    waited_seconds: float  # collectives that no computation hides
    seconds: float  # of the step, without the bubble of a pipeline


class RankFailure(Strict):
    """The reason why a rank cannot be built, or cannot make its step."""

    error: str  # type: message
    place: str  # innermost line of this project, or of torchtitan


class RankReport(Strict):
    """The answer to a task."""

    rank: int
    rehearsed: Rehearsed | None = None
    failure: RankFailure | None = None


class RankResult(Strict):
    """The report of a rank, beside what the plan expects."""

    rank: int
    pipeline_rank: int
    planned_memory: dict[str, Any]  # bytes, by the parts of a plan's estimate
    memory_difference: float | None  # (planned - rehearsed) / rehearsed; None where the rank does not build
    planned_flops: float  # of a step, with recomputation
    flops_ratio: float | None  # counted / planned
    report: RankReport


class PartResult(Strict):
    """A part of a stage, with the ranks that were rehearsed."""

    stage: str
    part: str
    gpus: int
    gpu: str
    ranks: list[RankResult]
    # predicted from the slowest of these ranks; None where a rank does not build
    bubble: float  # idle time of a pipeline, as a fraction of the time of its busiest rank
    step_seconds: float | None
    tokens_per_second_per_gpu: float | None

    @property
    def failures(self) -> list[tuple[int, RankFailure]]:
        return [(rank.rank, rank.report.failure) for rank in self.ranks if rank.report.failure is not None]

    @property
    def built(self) -> dict[int, Rehearsed]:
        """The ranks that build."""
        return {rank.rank: rank.report.rehearsed for rank in self.ranks if rank.report.rehearsed is not None}

    @property
    def busiest(self) -> tuple[int, Rehearsed]:
        """The rank with the largest peak."""
        return max(self.built.items(), key=lambda pair: pair[1].memory.total)
