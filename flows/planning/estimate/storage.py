"""Sizes and numbers of stored checkpoints, and the time and requests of saving them.

A save stops training while a GPU copies its part to host memory, and is written during training:

    copy = bytes x dp_replicate / processes / host_bandwidth        upload = bytes / storage_bandwidth

A save waits for the upload of the previous save, so the best interval is that of Young and Daly for the copy,
and no shorter than the upload.

Invariant: everything follows from resolved segments, by the engine's rules for saving and pruning
(`Segment.checkpoint_due`, `Checkpointing.kept`, `Anomalies.rollback_from`); only `requests_of` states
the requests of a checkpoint to object storage.
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

from flows.planning.estimate.sizes import parameters, state_bytes, trained_part
from infra.store.files.sinks import parts_of
from specs.capabilities import OPTIMIZERS
from specs.cluster import Cluster
from specs.intervals import expected_time, longest_interval, young_daly
from specs.stages.training import Segment
from specs.units import Duration

NOTICED = 0.01  # least fraction of training time lost against the best interval that is reported


class Checkpoints(NamedTuple):
    """Checkpoints of one segment."""

    bytes: int  # of one checkpoint
    written: int
    kept: int  # after the segment has finished
    most: int  # stored at any time, including one that is being written
    gap: int  # largest number of steps between two checkpoints


def trained_parameters(segment: Segment) -> int:
    part = trained_part(segment)
    return segment.model.parameters if part is None else round(part.total)


def weight_bytes(segment: Segment) -> int:
    """The bytes of the weights in float32, with any adapters."""
    adapters = trained_parameters(segment) if segment.adapters is not None else 0
    return 4 * (segment.model.parameters + adapters)


def checkpoint_bytes(segment: Segment) -> int:
    """The bytes of the weights in float32 and of the optimizer's states; schedule-free AdamW stores the
    weights that it trains beside the averaged ones."""
    model, trained = segment.model, trained_parameters(segment)
    part = trained_part(segment)
    matrices = model.n_layers * parameters(model).matrices if part is None else part.matrices
    states = state_bytes(segment.optimizer, matrices, trained - matrices, model, model.n_layers)
    assert segment.optimizer.name is not None, "the planner resolves the optimizer"
    more = 4 * trained if OPTIMIZERS[segment.optimizer.name].stores_trained else 0
    return round(weight_bytes(segment) + states + more)


def written_steps(segment: Segment, step_seconds: float | None) -> list[int]:
    """The steps whose checkpoints a segment writes: those that are due, and the end. An interval in time is
    counted in steps of `step_seconds`; if this is unknown, the interval adds no steps."""
    begin, end = segment.start_step, segment.end_step
    settings, anomalies = segment.checkpoint, segment.anomalies
    intervals = [
        _interval_steps(segment, step_seconds),
        settings.keep_every,
        anomalies.rollback_interval if anomalies.rolls_back else None,
    ]
    regular = (
        step for every in intervals if every for step in range((begin // every + 1) * every, end + 1, every)
    )
    return sorted({end, *regular, *(step for step in settings.milestones if begin < step <= end)})


def checkpoints(segment: Segment, step_seconds: float | None) -> Checkpoints:
    """The checkpoints that a segment writes and keeps. Pruning after each save keeps the newest `keep`, those
    kept for good, those that a rollback may go to, and at most one more for each metric of `best`."""
    settings, written = segment.checkpoint, written_steps(segment, step_seconds)
    for_good, most, passing = 0, 0, list[int]()
    for index, step in enumerate(written):
        most = max(most, for_good + len(passing) + 1)
        if settings.kept(step):
            for_good += 1
        else:
            passing.append(step)
        newest = written[max(0, index + 1 - settings.keep)]
        stays = min(newest, segment.anomalies.rollback_from(step, segment.start_step))
        passing = [old for old in passing if old >= stays]
    kept = min(len(written), for_good + len(passing) + len(settings.best))
    gap = max(after - before for before, after in pairwise([segment.start_step, *written]))
    return Checkpoints(
        checkpoint_bytes(segment), len(written), kept, min(len(written), most + len(settings.best)), gap
    )


def _interval_steps(segment: Segment, step_seconds: float | None) -> int | None:
    interval: object = segment.checkpoint.interval
    if isinstance(interval, Duration):
        return max(1, round(interval.seconds / step_seconds)) if step_seconds else None
    assert isinstance(interval, int)
    return interval


class Saving(NamedTuple):
    """Seconds of one segment's saves; None where the recipe does not state what they depend on."""

    copy: float | None = None  # to host memory; training stops
    upload: float | None = None  # to storage, during training
    interval: float | None = None  # longest time of training between two saves
    best: float | None = None  # the interval that wastes least
    lost: float | None = None  # time lost by `interval` beyond `best`, as a fraction of training time
    longest: float | None = None  # the interval that loses `NOTICED`


def saving(
    segment: Segment, processes: int, saved: Checkpoints, step_seconds: float | None, cluster: Cluster | None
) -> Saving:
    """The time of the saves of a segment, and the best interval between them."""
    interval = step_seconds * saved.gap if step_seconds is not None else None
    if cluster is None:
        return Saving(interval=interval)
    copy = upload = best = lost = longest = None
    if cluster.host_bandwidth is not None:
        copy = saved.bytes * segment.parallel.dp_replicate / processes / (cluster.host_bandwidth * 1e9)
    if cluster.storage_bandwidth is not None:
        upload = saved.bytes / (cluster.storage_bandwidth * 1e9)
    if copy is not None and upload is not None and cluster.mean_time_between_failures is not None:
        mean = cluster.mean_time_between_failures.seconds / -(-processes // cluster.gpus_per_node)
        best = max(young_daly(copy, mean), upload)
        longest = longest_interval(NOTICED, best, copy, mean)
        if interval is not None:
            lost = expected_time(max(interval, upload), copy, mean) - expected_time(best, copy, mean)
    return Saving(copy, upload, interval, best, lost, longest)


class StorageRequests(NamedTuple):
    """Requests to object storage that write and remove checkpoints."""

    put: int
    get: int  # around a marker
    list: int
    head: int
    delete: int

    def times(self, number: int) -> StorageRequests:
        return StorageRequests(*(number * count for count in self))


def requests_of(processes: int, size: int) -> StorageRequests:
    """The requests of a checkpoint of `size` bytes, from writing to deletion. It has a file per process, an
    index, rows of metrics, and the marker that commits it. A file of at least one part is uploaded in parts,
    with one request before and one after them and one for the digests of its pieces. The size of each file is
    read once, and the file is removed when newer checkpoints replace it. docs/object_storage.md has measured
    numbers."""
    parts = parts_of(-(-size // processes))
    files = processes + 2
    return StorageRequests(
        put=processes * (parts + 3 if parts else 1) + 3, get=3, list=2, head=files, delete=files
    )
