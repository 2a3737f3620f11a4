"""Estimates of a plan: FLOPs, hours, energy and cost, per stage that trains, samples or scores and in total;
memory and storage of training; processor time and bytes of corpora.

Invariants: estimates are a pure function of recipe and store; they load neither torch nor Prefect. Work that
two stages share is counted once, with the first.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from flows.planning.estimate import flops, storage, time_and_cost
from flows.planning.estimate.corpus_work import CorpusWork, corpora_of, corpus_totals
from flows.planning.estimate.inference import (
    TOKENS,
    PartInference,
    StageInference,
    infer,
    not_counted,
    sum_of,
)
from flows.planning.estimate.memory import Memory, memory_of_step
from flows.planning.estimate.storage import REQUESTS, Requests
from flows.planning.estimate.timeline import Span, spans
from flows.planning.estimate.work import Counter
from flows.planning.graph import Graph, Node
from flows.planning.run_records import Records
from infra.store import Store
from specs.cluster import Cluster
from specs.pipeline import Pipeline
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

    @property
    def lost_seconds(self) -> float:
        """Seconds that its interval between checkpoints wastes beyond the best one; 0 for a segment that is
        shorter than the best one and saves only at its end."""
        whole, best, lost = self.spent.seconds, self.saving.best, self.saving.lost
        if whole is not None and best is not None and lost is not None and whole >= best:
            return whole * lost
        return 0.0

    @property
    def masked_labels(self) -> int:
        """Labels that the Goldfish loss leaves out, nominally: one in k."""
        return self.node.tokens // self.segment.goldfish.k if self.segment.goldfish is not None else 0

    def to_json(self) -> dict[str, Any]:
        """Names as in docs/estimates.md."""
        return {
            "name": self.node.name,
            **borders(self.node),
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

    name: str
    kind: str
    parts: list[PartEstimate]
    cluster: Cluster | None

    @property
    def largest(self) -> PartEstimate:
        return max(self.parts, key=lambda part: part.memory.total)

    @property
    def costliest(self) -> PartEstimate:
        """The segment whose interval between checkpoints wastes most time; the last where that is unknown."""
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

    def sum(self, name: str) -> float | None:
        """Sum of a field of `Spent` over the parts; None where it is unknown for one."""
        return time_and_cost.total([getattr(part.spent, name) for part in self.parts])

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
            "masked_labels": sum(part.masked_labels for part in self.parts),
            **{name: self.sum(name) for name in time_and_cost.Spent._fields},
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


@dataclass(frozen=True)
class Estimates:
    """The estimates of a plan."""

    cluster: Cluster | None = None
    stages: dict[str, StageEstimate] = field(default_factory=dict)  # that train, in the order of the plan
    inference: dict[str, StageInference] = field(default_factory=dict)  # those that sample or score
    spans: dict[str, Span] = field(default_factory=dict)  # times of each part; empty where they are unknown
    corpora: dict[str, CorpusWork] = field(default_factory=dict)  # stages that make them
    loads: list[int] = field(default_factory=list)  # bytes of each read of a training checkpoint

    @property
    def parts(self) -> list[PartEstimate]:
        return [part for stage in self.stages.values() for part in stage.parts]

    @property
    def asking(self) -> list[PartInference]:
        """The parts that sample or score."""
        return [part for stage in self.inference.values() for part in stage.parts]

    @property
    def seconds(self) -> float | None:
        """Wall-clock of all parts that train, sample or score, in parallel as far as the nodes and the
        recipe's `concurrency` allow."""
        return max((span.end for span in self.spans.values()), default=None)

    def stored(self) -> tuple[dict[str, int], int]:
        """Stored bytes after the end of each part, in that order, and the most at any time. Where times are
        unknown, parts run one after the other."""
        times = self.spans or {part.node.name: Span(at, at + 1) for at, part in enumerate(self.parts)}
        events = [(times[part.node.name].begin, 1, part) for part in self.parts]
        events += [(times[part.node.name].end, 0, part) for part in self.parts]
        after, stored, peak = dict[str, int](), 0, 0
        for _, begins, part in sorted(events, key=lambda event: event[:2]):
            saved = part.checkpoints
            if begins:
                stored += saved.most * saved.bytes
                peak = max(peak, stored)
            else:
                stored -= (saved.most - saved.kept) * saved.bytes
                after[part.node.name] = stored
        return after, peak

    def totals(self) -> dict[str, Any]:
        """Sums over the stages; `seconds` is the wall-clock, memory the largest of any, and
        `peak_storage_bytes` the most that is stored at any time, retention included. `flops`, hours, energy
        and cost are those of training and, without the parts in `not_counted`, of sampling and scoring;
        `inference` has the latter alone."""
        documents = [stage.to_json() for stage in self.stages.values()]
        stored = sum(part.checkpoints.kept * part.checkpoints.bytes for part in self.parts)
        requests = Requests(0, 0, 0, 0, 0)
        for part in self.parts:
            every = part.requests.times(part.checkpoints.written)
            requests = Requests(*(before + more for before, more in zip(requests, every, strict=True)))
        price = self.cluster.storage_price if self.cluster else None
        asked = self._inference_totals()
        training = {
            name: time_and_cost.total([stage.sum(name) for stage in self.stages.values()])
            for name in time_and_cost.Spent._fields
        }
        return {
            "parameters": max((document["parameters"] for document in documents), default=0),
            **{
                name: sum(document[name] for document in documents)
                for name in ("tokens", "sequences", "steps", "recomputed_flops", "masked_labels")
            },
            "flops": sum(document["flops"] for document in documents) + asked["flops"],
            **{
                name: time_and_cost.total(
                    [*([training[name]] if documents else []), *([asked[name]] if asked["gpu_hours"] else [])]
                )
                for name in time_and_cost.Spent._fields
            },
            "seconds": self.seconds,
            "memory_bytes": max((document["memory_bytes"]["total"] for document in documents), default=0),
            "checkpoints_written_bytes": sum(
                document["checkpoint"]["written_bytes"] for document in documents
            ),
            "stored_bytes": stored,
            "peak_storage_bytes": self.stored()[1],
            "storage_cost_per_month": stored / 1e12 * price if price is not None else None,
            "requests": requests._asdict(),
            **corpus_totals(self.corpora),
            "checkpoint_loads": len(self.loads),
            "checkpoint_read_bytes": sum(self.loads),
            **{name: asked[name] for name in TOKENS},
            "inference": asked,
            "not_counted": not_counted(self.asking),
        }

    def _inference_totals(self) -> dict[str, Any]:
        """Sums over the parts that sample or score and are counted; `seconds`: one after the other."""
        parts = [part for part in self.asking if part.counted]
        return {
            "requests": round(sum(part.work.requests for part in parts)),
            "read_tokens": round(sum(part.work.read for part in parts)),
            "sampled_tokens": round(sum(part.work.sampled for part in parts)),
            "flops": sum(part.flops for part in parts),
            **{name: sum_of(parts, name) for name in time_and_cost.Spent._fields},
        }

    def to_json(self, masked_by_hash: Callable[[Segment, int], int] | None = None) -> dict[str, Any]:
        """The JSON form. `masked_by_hash` counts the labels of a segment that the hash of Goldfish leaves
        out; it needs numpy, which the planner does not load (`flows.inspection.goldfish`). Without it
        `masked_labels_by_hash` is None."""
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
        after, _ = self.stored()
        stages, totals = {name: stage.to_json() for name, stage in self.stages.items()}, self.totals()
        for name, stage in self.stages.items():
            masked = [
                masked_by_hash(part.segment, part.node.tokens) if masked_by_hash else None
                for part in stage.parts
            ]
            more = [
                {"masked_labels_by_hash": by, "stored_bytes_after": after[part.node.name]}
                for part, by in zip(stage.parts, masked, strict=True)
            ]
            stages[name]["masked_labels_by_hash"] = time_and_cost.total(masked)
            stages[name]["parts"] = [
                part.to_json() | fields for part, fields in zip(stage.parts, more, strict=True)
            ]
        totals["masked_labels_by_hash"] = time_and_cost.total(
            [stage["masked_labels_by_hash"] for stage in stages.values()]
        )
        inference = {name: stage.to_json() for name, stage in self.inference.items()}
        corpora = {name: stage.to_json() for name, stage in self.corpora.items()}
        return {
            "cluster": facts,
            "stages": stages,
            "inference": inference,
            "corpora": corpora,
            "totals": totals,
        }


def estimate(graph: Graph, pipeline: Pipeline, store: Store) -> Estimates:
    """The estimates of all stages that train, sample or score."""
    cluster, records = pipeline.cluster, Records(store, pipeline.name)
    nodes = [node for node in graph.nodes.values() if isinstance(node.part, Segment)]
    duplicates = graph.duplicates()
    nodes = [node for node in nodes if node.name not in duplicates]
    measured = time_and_cost.measured_mfu(nodes, store, cluster, records)
    stages: dict[str, list[PartEstimate]] = {}
    for node in nodes:
        stages.setdefault(node.stage, []).append(part_estimate(node, cluster, measured))
    found = {name: StageEstimate(name, parts[0].node.kind, parts, cluster) for name, parts in stages.items()}
    counter = Counter(graph, store, records)
    asking = infer(graph, counter, cluster, measured)
    times = _spans(graph, found, asking, pipeline)
    return Estimates(cluster, found, asking, times, corpora_of(graph, counter), _loads(graph))


def _spans(
    graph: Graph,
    stages: dict[str, StageEstimate],
    inference: dict[str, StageInference],
    pipeline: Pipeline,
) -> dict[str, Span]:
    """When each part would run; empty where the time of one that trains is unknown."""
    cluster, training = pipeline.cluster, [part for stage in stages.values() for part in stage.parts]
    asking = [part for stage in inference.values() for part in stage.parts]
    if cluster is None or any(part.spent.seconds is None for part in training):
        return {}
    parts: list[PartEstimate | PartInference] = [*training, *asking]
    seconds = {part.node.name: part.spent.seconds for part in parts if part.spent.seconds is not None}
    nodes = {part.node.name: -(-part.gpus // cluster.gpus_per_node) for part in parts}
    return spans(graph, seconds, nodes, pipeline.concurrency, cluster.nodes)


def _loads(graph: Graph) -> list[int]:
    """Bytes of each read of a training checkpoint by a part: its weights, and its states where training
    continues with them, in the next segment of a phase or by `carry`."""
    duplicates, found = graph.duplicates(), []
    for node in graph.nodes.values():
        for read in node.inputs.values() if node.name not in duplicates else ():
            parent = graph.nodes[read.node] if read.node is not None else None
            if read.step is not None and parent is not None and isinstance(parent.part, Segment):
                chained = isinstance(node.part, Segment) and (
                    node.phase == parent.phase or "optimizer" in node.part.carry
                )
                found.append(
                    storage.checkpoint_bytes(parent.part) if chained else storage.weight_bytes(parent.part)
                )
    return found


def borders(node: Node) -> dict[str, Any]:
    """First and last step of a segment, and the tokens of its stage before and after it; all None for
    other parts."""
    segment = node.part if isinstance(node.part, Segment) else None
    return {
        "start_step": segment.start_step if segment else None,
        "end_step": segment.end_step if segment else None,
        "start_tokens": segment.start_tokens if segment else None,
        "end_tokens": segment.tokens_at(segment.end_step) if segment else None,
    }


def part_estimate(node: Node, cluster: Cluster | None, measured: dict[str, float]) -> PartEstimate:
    """The estimate of one segment. `measured`: the MFU of stored stages."""
    segment, processes = node.part, node.launch.world_size
    assert isinstance(segment, Segment)
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
        requests=REQUESTS(processes, saved.bytes),
    )


def _seconds(saving: storage.Saving) -> dict[str, float | None]:
    return {
        "copy_seconds": saving.copy,
        "write_seconds": saving.upload,
        "interval_seconds": saving.interval,
        "young_daly_seconds": saving.best,
        "lost": saving.lost,
    }
