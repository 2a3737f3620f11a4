"""What a plan would take: FLOPs, hours, energy, cost, memory, storage, per stage of training and in all.

Invariants: estimates are a pure function of recipe and store; they load neither torch nor Prefect. Only training is estimated: sampling,
evaluation and data work are not, and docs/estimates.md says so. Work that two stages share is counted once, with the first.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from flows.estimate import flops, storage, time_and_cost
from flows.estimate.memory import Memory, memory_of_step
from flows.estimate.storage import REQUESTS, Requests
from flows.graph import Graph, Node
from flows.nearest import Records
from infra.store import Store
from specs.cluster import Cluster
from specs.intervals import young_daly
from specs.pipeline import Pipeline
from specs.stages.training import Segment


@dataclass(frozen=True)
class PartEstimate:
    """One segment. `flops` without recomputation; `step_seconds` of one optimizer step; `mfu_source`: stated, measured, measured elsewhere,
    or None where nothing says."""

    node: Node
    flops: int
    recomputed_flops: int
    mfu: float | None
    mfu_source: str | None
    spent: time_and_cost.Spent
    memory: Memory
    checkpoints: storage.Checkpoints
    requests: Requests

    @property
    def segment(self) -> Segment:
        assert isinstance(self.node.part, Segment)
        return self.node.part

    @property
    def gpus(self) -> int:
        return self.node.launch.world_size

    @property
    def sequences(self) -> int:
        return self.node.steps * self.segment.global_batch_size

    @property
    def step_seconds(self) -> float | None:
        return self.spent.seconds / self.node.steps if self.spent.seconds is not None else None


@dataclass(frozen=True)
class StageEstimate:
    """A stage of training, the sum of its segments; memory is that of the segment that needs the most."""

    name: str
    kind: str
    parts: list[PartEstimate]
    cluster: Cluster | None
    checkpoint_seconds: float | None
    best_interval_seconds: float | None

    @property
    def largest(self) -> PartEstimate:
        return max(self.parts, key=lambda part: part.memory.total)

    @property
    def interval_seconds(self) -> float | None:
        """Time between checkpoints as stated, in the last segment; the whole segment where that is shorter."""
        part = self.parts[-1]
        steps = storage.interval_steps(part.segment, part.step_seconds)
        return part.step_seconds * min(steps, part.node.steps) if part.step_seconds is not None and steps else None

    @property
    def alike(self) -> tuple[Any, ...]:
        """What stages have in common that take the same."""
        return (self.parts[0].gpus, sum(part.flops for part in self.parts), self.largest.memory, self.parts[-1].checkpoints)

    def sum(self, name: str) -> float | None:
        """Sum of a field of `Spent` over the parts; None where it is not known of one."""
        return _sum([getattr(part.spent, name) for part in self.parts])

    def to_json(self) -> dict[str, Any]:
        """Names as in docs/estimates.md, which gives the units."""
        first, last = self.parts[0], self.parts[-1]
        segment, limit = last.segment, self.cluster.device.memory if self.cluster else None
        need = self.largest.memory.to_json()
        return {
            "kind": self.kind,
            "parameters": segment.model.parameters,
            "trained_parameters": storage.trained_parameters(segment),
            "tokens": sum(part.node.tokens for part in self.parts),
            "sequences": sum(part.sequences for part in self.parts),
            "steps": sum(part.node.steps for part in self.parts),
            "flops": sum(part.flops for part in self.parts),
            "recomputed_flops": sum(part.recomputed_flops for part in self.parts),
            "gpus": first.gpus,
            "nodes": -(-first.gpus // self.cluster.gpus_per_node) if self.cluster else None,
            "mfu": first.mfu,
            "mfu_source": first.mfu_source,
            **{name: self.sum(name) for name in time_and_cost.Spent._fields},
            "memory_bytes": need,
            "memory_limit_bytes": limit,
            "fits": need["total"] <= limit if limit else None,
            "checkpoint": {
                "bytes": last.checkpoints.bytes,
                "write_seconds": self.checkpoint_seconds,
                "interval_seconds": self.interval_seconds,
                "young_daly_seconds": self.best_interval_seconds,
                "written": sum(part.checkpoints.written for part in self.parts),
                "written_bytes": sum(part.checkpoints.written * part.checkpoints.bytes for part in self.parts),
                "kept": sum(part.checkpoints.kept for part in self.parts),
                "kept_bytes": sum(part.checkpoints.kept * part.checkpoints.bytes for part in self.parts),
                "requests_each": last.requests._asdict(),
            },
        }


@dataclass(frozen=True)
class Estimates:
    """Stages of training, in the order of the plan."""

    cluster: Cluster | None = None
    stages: dict[str, StageEstimate] = field(default_factory=dict)

    def totals(self) -> dict[str, Any]:
        """Sums over the stages; seconds are those of the stages one after the other, memory is the most of any, and `peak_storage_bytes`
        the most that is stored at a time, retention included."""
        documents = [stage.to_json() for stage in self.stages.values()]
        parts = [part for stage in self.stages.values() for part in stage.parts]
        stored = peak = 0
        requests = Requests(0, 0, 0, 0, 0)
        for part in parts:
            peak = max(peak, stored + part.checkpoints.most * part.checkpoints.bytes)
            stored += part.checkpoints.kept * part.checkpoints.bytes
            every = part.requests.times(part.checkpoints.written)
            requests = Requests(*(before + more for before, more in zip(requests, every, strict=True)))
        price = self.cluster.storage_price if self.cluster else None
        return {
            "parameters": max((document["parameters"] for document in documents), default=0),
            **{
                name: sum(document[name] for document in documents)
                for name in ("tokens", "sequences", "steps", "flops", "recomputed_flops")
            },
            **{name: _sum([stage.sum(name) for stage in self.stages.values()]) for name in time_and_cost.Spent._fields},
            "memory_bytes": max((document["memory_bytes"]["total"] for document in documents), default=0),
            "checkpoints_written_bytes": sum(document["checkpoint"]["written_bytes"] for document in documents),
            "stored_bytes": stored,
            "peak_storage_bytes": max(peak, stored),
            "storage_cost_per_month": stored / 1e12 * price if price is not None else None,
            "requests": requests._asdict(),
        }

    def to_json(self) -> dict[str, Any]:
        cluster = self.cluster
        facts = None
        if cluster is not None:
            gpu = cluster.device
            facts = {
                "gpu": cluster.gpu,
                "gpus": cluster.nodes * cluster.gpus_per_node,
                "bf16_flops": gpu.bf16_flops,
                "memory_bytes": gpu.memory,
                "watts": cluster.watts,
                "pue": cluster.pue,
                "source": gpu.source,
            }
        return {"cluster": facts, "stages": {name: stage.to_json() for name, stage in self.stages.items()}, "totals": self.totals()}


def estimate(graph: Graph, pipeline: Pipeline, store: Store) -> Estimates:
    """The estimates of all stages of training."""
    cluster = pipeline.cluster
    nodes = [node for node in graph.nodes.values() if isinstance(node.part, Segment)]
    twins = graph.twins()
    nodes = [node for node in nodes if node.name not in twins]
    measured = time_and_cost.measured_mfu(nodes, store, cluster, Records(store, pipeline.name))
    stages: dict[str, list[PartEstimate]] = {}
    for node in nodes:
        stages.setdefault(node.stage, []).append(part_estimate(node, cluster, measured))
    return Estimates(cluster, {name: _stage(name, parts, cluster) for name, parts in stages.items()})


def part_estimate(node: Node, cluster: Cluster | None, measured: dict[str, float]) -> PartEstimate:
    """The estimate of one segment. `measured`: the MFU of stored stages."""
    segment, processes = node.part, node.launch.world_size
    assert isinstance(segment, Segment)
    mfu = time_and_cost.utilisation(node, cluster, measured)
    model_flops = node.tokens * flops.training(segment)
    spent = time_and_cost.spent(model_flops, processes, mfu.value, cluster)
    saved = storage.checkpoints(segment, spent.seconds / node.steps if spent.seconds is not None else None)
    return PartEstimate(
        node=node,
        flops=model_flops,
        recomputed_flops=node.tokens * flops.recomputation(segment),
        mfu=mfu.value,
        mfu_source=mfu.source,
        spent=spent,
        memory=memory_of_step(segment, processes),
        checkpoints=saved,
        requests=REQUESTS(processes, saved.bytes),
    )


def _stage(name: str, parts: list[PartEstimate], cluster: Cluster | None) -> StageEstimate:
    write = best = None
    if cluster is not None and cluster.storage_bandwidth is not None:
        write = parts[-1].checkpoints.bytes / (cluster.storage_bandwidth * 1e9)
        if cluster.mean_time_between_failures is not None:
            nodes = -(-parts[-1].gpus // cluster.gpus_per_node)
            best = young_daly(write, cluster.mean_time_between_failures.seconds / nodes)
    return StageEstimate(name, parts[0].node.kind, parts, cluster, write, best)


def _sum(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) if known and len(known) == len(values) else None
