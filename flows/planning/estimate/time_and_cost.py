"""Converts FLOPs to GPU-hours, wall-clock time, energy and cost, reads the utilisation of stored runs, and
computes when each part would run.

    GPU-hours = FLOPs / (MFU x peak) / 3600
    seconds   = 3600 GPU-hours / GPUs
    kWh       = GPU-hours x watts x PUE / 1000

Invariant: a number that depends on an unknown (a price, a utilisation) is None, never a guess.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import NamedTuple

from flows.planning.estimate.flops import peak
from flows.planning.graph import Graph, Node
from flows.planning.run_records import Records
from infra.store import Artifact, Store, StoreError
from specs.cluster import Cluster


class Spent(NamedTuple):
    """Time and cost of a number of FLOPs."""

    seconds: float | None = None  # wall-clock
    gpu_hours: float | None = None
    energy_kwh: float | None = None  # with the PUE
    cost: float | None = None  # in the currency of the price

    @classmethod
    def of(cls, parts: Iterable[Spent]) -> Spent:
        """The sum over parts; a field is None if it is unknown for one of them, or if there are none."""
        return cls(*map(total, zip(*parts, strict=True)))


def spent(
    flops: float, gpus: int, mfu: float | None, cluster: Cluster | None, peak: float | None = None
) -> Spent:
    """Time and cost of `flops` model FLOPs on `gpus` GPUs of a cluster, whose peak in bfloat16 is used by
    default."""
    if cluster is None or mfu is None:
        return Spent()
    return used(flops / (mfu * (peak or cluster.device.bf16_flops)) / gpus, gpus, cluster)


def used(seconds: float | None, gpus: int, cluster: Cluster | None) -> Spent:
    if cluster is None or seconds is None:
        return Spent()
    hours, price = seconds * gpus / 3600, cluster.price_per_gpu_hour
    return Spent(
        seconds,
        hours,
        hours * cluster.watts * cluster.pue / 1000,
        hours * price if price is not None else None,
    )


def total(values: Sequence[float | None]) -> float | None:
    """The sum of the values; None if one is unknown, or if there are none."""
    known = [value for value in values if value is not None]
    return sum(known) if known and len(known) == len(values) else None


class Utilisation(NamedTuple):
    """An MFU and its source."""

    value: float | None
    source: str | None  # `stated`, `measured` (of this stage), `measured elsewhere` (median of the others)


def utilisation(node: Node, cluster: Cluster | None, measured: dict[str, float]) -> Utilisation:
    """The MFU with which a part is planned. `measured`: that of stored stages."""
    if node.launch.mfu is not None:
        return Utilisation(node.launch.mfu, "stated")
    if cluster is None:
        return Utilisation(None, None)
    if cluster.mfu != "measured":
        return Utilisation(cluster.mfu, "stated")
    if node.stage in measured:
        return Utilisation(measured[node.stage], "measured")
    if measured:
        return Utilisation(median(measured.values()), "measured elsewhere")
    return Utilisation(None, None)


def measured_mfu(
    nodes: list[Node], store: Store, cluster: Cluster | None, records: Records
) -> dict[str, float]:
    """The MFU of each stage: the median over its segments of `tokens_per_second x FLOPs per token /
    (processes x peak)`, from their stored results, or from those of the parts with the same names in the last
    run of the pipeline."""
    if cluster is None or cluster.mfu != "measured":
        return {}
    utilisations: dict[str, list[float]] = {}
    for node in nodes:
        speed = _speed(store, node.path)
        last = records.last(node.name)
        if speed is None and last is not None:
            speed = _speed(store, last.path)
        if speed is not None and node.segment is not None and node.tokens:
            utilisations.setdefault(node.stage, []).append(
                speed * node.flops / node.tokens / peak(node.segment, cluster.device)
            )
    return {stage: median(values) for stage, values in utilisations.items()}


def _speed(store: Store, path: str) -> float | None:
    """The tokens per second and process from the last manifest of a trajectory; None if there is none, or if
    it is damaged."""
    try:
        steps = Artifact(store, path).manifest_steps()
        if not steps:
            return None
        manifest = Artifact(store, path, max(steps)).manifest
        processes = manifest.execution.launch.get("processes") or 1
        return float(manifest.metrics["tokens_per_second"]) / processes
    except (StoreError, KeyError, TypeError, ValueError):
        return None


class Span(NamedTuple):
    """The begin and end times of a part, in seconds from the start of the run."""

    begin: float
    end: float


def spans(
    graph: Graph, seconds: Mapping[str, float], nodes: Mapping[str, int], concurrency: int, available: int
) -> dict[str, Span]:
    """The span of every part in `seconds`, with the `nodes` that it needs out of `available`, if everything
    else took no time. Parts begin in the order of the plan, each as soon as its inputs are ready, fewer than
    `concurrency` others are running, and the nodes that it needs are free; while one waits, later ones may
    start. A run submits them in the same way (`flows.execution.flow`), except that the cluster makes them
    wait for nodes."""
    duplicates = graph.duplicates
    needs = {name: _needs(graph, name, duplicates) for name in graph.nodes}
    waiting, finished, times = list(graph.nodes), set[str](), dict[str, Span]()
    running: dict[str, int] = {}
    now = 0.0
    while waiting:
        begun = set[str]()
        for name in waiting:  # inputs first
            needed = min(nodes.get(name, 0), available)
            if not needs[name] <= finished:
                continue
            if name not in seconds:
                finished.add(name)
            elif len(running) < concurrency and needed <= available - sum(running.values()):
                running[name], times[name] = needed, Span(now, now + seconds[name])
            else:
                continue
            begun.add(name)
        waiting = [name for name in waiting if name not in begun]
        if begun and not running:
            continue  # `after:` may name a later stage of the plan
        if not running:
            break
        first = min(running, key=lambda name: times[name].end)
        now = times[first].end
        del running[first]
        finished.add(first)
    return times


def _needs(graph: Graph, name: str, duplicates: Mapping[str, str]) -> set[str]:
    """Parts that must finish before a part begins; for a duplicate, the part that does its work."""
    node = graph.nodes[name]
    before = {end for stage in graph.after.get(node.stage, ()) for end in graph.ends_of(stage)}
    return {duplicates[name]} if name in duplicates else {*graph.parents(node), *before}
