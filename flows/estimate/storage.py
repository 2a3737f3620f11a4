"""Sizes of checkpoints, what of them is stored at a time, and how many requests they take.

Invariant: everything follows from resolved segments; `REQUESTS` is the one place that says what a checkpoint asks of object storage.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from flows.estimate.memory import adapters, parameters, state_bytes
from infra.store.sinks import parts_of
from specs.stages.sft import SftSegment
from specs.stages.training import Segment
from specs.units import Duration


class Checkpoints(NamedTuple):
    """Of one segment. bytes: of one checkpoint; written: how many are; kept: how many stay when it is finished; most: how many there are at
    a time, while one more is written than is kept."""

    bytes: int
    written: int
    kept: int
    most: int


def trained_parameters(segment: Segment) -> int:
    """Parameters that have gradients: all, or those of the adapters."""
    lora = segment.lora if isinstance(segment, SftSegment) else None
    return segment.model.parameters if lora is None else segment.model.n_layers * adapters(segment.model, lora.rank, lora.targets)


def checkpoint_bytes(segment: Segment) -> int:
    """Weights in float32 and the optimizer's states; schedule-free AdamW stores the weights that it trains beside the averaged ones."""
    model, trained = segment.model, trained_parameters(segment)
    whole = trained == model.parameters
    count = parameters(model)
    matrices = model.n_layers * count.matrices if whole else float(trained)
    states = state_bytes(segment.optimizer, matrices, trained - matrices, model, model.n_layers)
    more = 4 * trained if segment.optimizer.name == "schedule-free-adamw" else 0
    return round(4 * (model.parameters + (0 if whole else trained)) + states + more)


def checkpoints(segment: Segment, step_seconds: float | None) -> Checkpoints:
    """How often a segment saves and what retention leaves: the last `keep`, milestones and the end. An interval that is a time is counted
    in steps of `step_seconds`; where these are not known only the end counts."""
    begin, end, settings = segment.start_step, segment.end_step, segment.checkpoint
    interval = interval_steps(segment, step_seconds)
    written = {end, *range((begin // interval + 1) * interval, end + 1, interval)} if interval else {end}
    milestones = {step for step in settings.milestones if begin < step <= end}
    kept = len(milestones & written | {end})
    return Checkpoints(checkpoint_bytes(segment), len(written), kept, min(len(written), kept + settings.keep + 1))


def interval_steps(segment: Segment, step_seconds: float | None) -> int | None:
    """Steps between two checkpoints."""
    interval: object = segment.checkpoint.interval
    if isinstance(interval, Duration):
        return max(1, round(interval.seconds / step_seconds)) if step_seconds else None
    assert isinstance(interval, int)
    return interval


class Requests(NamedTuple):
    """Requests to object storage."""

    put: int
    get: int
    list: int
    head: int
    delete: int

    def times(self, number: int) -> Requests:
        return Requests(*(number * count for count in self))


def _counted(processes: int, size: int) -> Requests:
    """A checkpoint has a file per process, an index, rows of metrics, and the marker that commits it. A file that is no shorter than a part
    goes up in parts, with a request before and one after them and one for the digests of its pieces; each file is looked at once for its
    size, and removed when newer checkpoints take its place. docs/object_storage.md has what a server saw."""
    parts = parts_of(-(-size // processes))
    files = processes + 2
    return Requests(put=processes * (parts + 3 if parts else 1) + 3, get=3, list=1, head=files, delete=files)


REQUESTS: Callable[[int, int], Requests] = _counted
"""(processes, bytes of the checkpoint) -> requests of writing it once."""
