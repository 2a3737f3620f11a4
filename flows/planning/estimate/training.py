"""Estimates of training, for one segment and for a stage with all its segments.

Invariant: a number that depends on machines is None where the recipe has no `cluster:`.
"""

from dataclasses import dataclass
from typing import Any

from flows.planning.estimate import flops, storage, time_and_cost
from flows.planning.estimate.memory import Memory, memory_of_step
from flows.planning.estimate.storage import StorageRequests, requests_of
from flows.planning.graph import Node
from specs.cluster import Cluster
from specs.stages.training import Segment


@dataclass(frozen=True)
class PartEstimate:
    """The estimate of one segment."""

    node: Node
    flops: int  # without recomputation
    recomputed_flops: int
    mfu: float | None
    mfu_source: str | None  # stated, measured, measured elsewhere, or None where it is unknown
    spent: time_and_cost.Spent
    memory: Memory
    checkpoints: storage.Checkpoints
    saving: storage.Saving
    requests: StorageRequests

    @property
    def segment(self) -> Segment:
        assert self.node.segment is not None
        return self.node.segment

    @property
    def gpus(self) -> int:
        return self.node.launch.world_size

    @property
    def sequences(self) -> int:
        return self.node.steps * self.segment.global_batch_size

    @property
    def step_seconds(self) -> float | None:
        return self.spent.seconds / self.node.steps if self.spent.seconds is not None else None

    @property
    def lost_seconds(self) -> float:
        """The seconds that the segment's interval between checkpoints wastes beyond the best interval; 0 for
        a segment that is shorter than the best interval and saves only at its end."""
        whole, best, lost = self.spent.seconds, self.saving.best, self.saving.lost
        if whole is not None and best is not None and lost is not None and whole >= best:
            return whole * lost
        return 0.0

    @property
    def masked_labels(self) -> int:
        """The nominal number of labels that the Goldfish loss leaves out: one in k."""
        return self.node.tokens // self.segment.goldfish.k if self.segment.goldfish is not None else 0

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.node.name,
            **extent(self.node),
            "seconds": self.spent.seconds,
            "masked_labels": self.masked_labels,
            "checkpoint": {
                **_seconds(self.saving),
                "written": self.checkpoints.written,
                "kept": self.checkpoints.kept,
            },
        }


@dataclass(frozen=True)
class StageEstimate:
    """A training stage: the sum of its segments, and the memory of the one that needs the most."""

    kind: str
    parts: list[PartEstimate]
    cluster: Cluster | None

    @property
    def largest(self) -> PartEstimate:
        return max(self.parts, key=lambda part: part.memory.total)

    @property
    def costliest(self) -> PartEstimate:
        """The segment whose checkpoint interval wastes the most time; the last one if that is unknown."""
        return max(self.parts, key=lambda part: (part.lost_seconds, part.segment.start_step))

    @property
    def alike(self) -> tuple[Any, ...]:
        """A key that is equal for stages with equal estimates."""
        return (
            self.parts[0].gpus,
            sum(part.flops for part in self.parts),
            self.largest.memory,
            self.parts[-1].checkpoints,
        )

    @property
    def spent(self) -> time_and_cost.Spent:
        return time_and_cost.Spent.of(part.spent for part in self.parts)

    def to_json(self) -> dict[str, Any]:
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
            "masked_labels": sum(part.masked_labels for part in self.parts),
            **self.spent._asdict(),
            "memory_bytes": need,
            "memory_limit_bytes": limit,
            "fits": need["total"] <= limit if limit else None,
            "checkpoint": {
                "bytes": last.checkpoints.bytes,
                **_seconds(self.costliest.saving),
                "written": sum(part.checkpoints.written for part in self.parts),
                "written_bytes": sum(
                    part.checkpoints.written * part.checkpoints.bytes for part in self.parts
                ),
                "kept": sum(part.checkpoints.kept for part in self.parts),
                "kept_bytes": sum(part.checkpoints.kept * part.checkpoints.bytes for part in self.parts),
                "requests_each": last.requests._asdict(),
            },
        }


def extent(node: Node) -> dict[str, Any]:
    """First and last step of a segment, and the tokens of its stage before and after it; all None for
    other parts."""
    segment = node.segment
    return {
        "start_step": segment.start_step if segment else None,
        "end_step": segment.end_step if segment else None,
        "start_tokens": segment.start_tokens if segment else None,
        "end_tokens": segment.tokens_at(segment.end_step) if segment else None,
    }


def part_estimate(node: Node, cluster: Cluster | None, measured: dict[str, float]) -> PartEstimate:
    """The estimate of one segment. `measured`: the MFU of stored stages."""
    segment, processes = node.segment, node.launch.world_size
    assert segment is not None
    mfu = time_and_cost.utilisation(node, cluster, measured)
    model_flops = node.tokens * flops.training(segment)
    peak = flops.peak(segment, cluster.device) if cluster is not None else None
    spent = time_and_cost.spent(model_flops, processes, mfu.value, cluster, peak)
    step_seconds = spent.seconds / node.steps if spent.seconds is not None else None
    saved = storage.checkpoints(segment, step_seconds)
    return PartEstimate(
        node=node,
        flops=model_flops,
        recomputed_flops=node.tokens * flops.recomputation(segment),
        mfu=mfu.value,
        mfu_source=mfu.source,
        spent=spent,
        memory=memory_of_step(segment, processes),
        checkpoints=saved,
        saving=storage.saving(segment, processes, saved, step_seconds, cluster),
        requests=requests_of(processes, saved.bytes),
    )


def _seconds(saving: storage.Saving) -> dict[str, float | None]:
    return {
        "copy_seconds": saving.copy,
        "write_seconds": saving.upload,
        "interval_seconds": saving.interval,
        "young_daly_seconds": saving.best,
        "lost": saving.lost,
    }
