"""Estimates of a plan: FLOPs, hours, energy and cost, per stage that trains, samples or scores and in total;
memory and storage of training; processor time and bytes of corpora. docs/estimates.md has the names of their
JSON form.

Invariants: estimates are a pure function of recipe and store; they load neither torch nor Prefect. Work that
two stages share is counted once, with the first.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from flows.planning.estimate import storage, time_and_cost
from flows.planning.estimate.corpus_work import CorpusWork, corpora_of, corpus_totals
from flows.planning.estimate.inference import (
    TOKENS,
    PartInference,
    StageInference,
    infer,
    not_counted,
    spent_of,
)
from flows.planning.estimate.storage import StorageRequests
from flows.planning.estimate.time_and_cost import Span, spans
from flows.planning.estimate.training import PartEstimate, StageEstimate, part_estimate
from flows.planning.estimate.work import Known
from flows.planning.graph import Graph
from flows.planning.run_records import Records
from infra.store import Store
from specs.cluster import Cluster
from specs.pipeline import Pipeline
from specs.stages.training import Segment


@dataclass(frozen=True)
class Estimates:
    """The estimates of a plan."""

    cluster: Cluster | None = None
    stages: dict[str, StageEstimate] = field(default_factory=dict)  # stages that train, in plan order
    inference: dict[str, StageInference] = field(default_factory=dict)  # stages that sample or score
    spans: dict[str, Span] = field(default_factory=dict)  # times of each part; empty where they are unknown
    corpora: dict[str, CorpusWork] = field(default_factory=dict)  # stages that make corpora
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
        """The wall-clock time of all parts that train, sample or score, in parallel as far as the nodes and
        the recipe's `concurrency` allow."""
        return max((span.end for span in self.spans.values()), default=None)

    def stored(self) -> tuple[dict[str, int], int]:
        """The stored bytes after the end of each part, in the order of the ends, and the most at any time. If
        times are unknown, parts are assumed to run one after the other."""
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
        """Sums over the stages; `seconds` is the wall-clock time, memory the largest of any stage, and
        `peak_storage_bytes` the most that is stored at any time, under the retention settings. `flops`,
        hours, energy and cost are those of training and, without the parts in `not_counted`, of sampling and
        scoring; `inference` has those of sampling and scoring alone."""
        documents = [stage.to_json() for stage in self.stages.values()]
        stored = sum(part.checkpoints.kept * part.checkpoints.bytes for part in self.parts)
        each = [part.requests.times(part.checkpoints.written) for part in self.parts]
        requests = StorageRequests(*map(sum, zip(StorageRequests(0, 0, 0, 0, 0), *each, strict=True)))
        price = self.cluster.storage_price if self.cluster else None
        asked = self._inference_totals()
        sums = ("tokens", "sequences", "steps", "recomputed_flops", "masked_labels")
        spent = [stage.spent for stage in self.stages.values()]
        if asked["gpu_hours"]:
            spent.append(spent_of(self.asking))
        return {
            "parameters": max((document["parameters"] for document in documents), default=0),
            **{name: sum(document[name] for document in documents) for name in sums},
            "flops": sum(document["flops"] for document in documents) + asked["flops"],
            **time_and_cost.Spent.of(spent)._asdict(),
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
        """Sums over the counted parts that sample or score; `seconds` is for one part after the other."""
        parts = [part for part in self.asking if part.counted]
        return {
            "requests": round(sum(part.work.requests for part in parts)),
            "read_tokens": round(sum(part.work.read_tokens for part in parts)),
            "sampled_tokens": round(sum(part.work.sampled_tokens for part in parts)),
            "flops": sum(part.flops for part in parts),
            **spent_of(parts)._asdict(),
        }

    def to_json(self, masked_by_hash: Callable[[Segment, int], int] | None = None) -> dict[str, Any]:
        """The JSON form. `masked_by_hash` counts the labels of a segment that the hash of Goldfish leaves
        out; it needs numpy, which the planner does not load (`flows.inspection.goldfish`). Without it
        `masked_labels_by_hash` is None."""
        after, _ = self.stored()
        stages = {}
        for name, stage in self.stages.items():
            parts = [part.to_json() | {"stored_bytes_after": after[part.node.name]} for part in stage.parts]
            for document, part in zip(parts, stage.parts, strict=True):
                masked = masked_by_hash(part.segment, part.node.tokens) if masked_by_hash else None
                document["masked_labels_by_hash"] = masked
            whole = time_and_cost.total([document["masked_labels_by_hash"] for document in parts])
            stages[name] = stage.to_json() | {"masked_labels_by_hash": whole, "parts": parts}
        of_stages = [stage["masked_labels_by_hash"] for stage in stages.values()]
        return {
            "cluster": self._facts() if self.cluster is not None else None,
            "stages": stages,
            "inference": {name: stage.to_json() for name, stage in self.inference.items()},
            "corpora": {name: stage.to_json() for name, stage in self.corpora.items()},
            "totals": self.totals() | {"masked_labels_by_hash": time_and_cost.total(of_stages)},
        }

    def _facts(self) -> dict[str, Any]:
        assert self.cluster is not None
        gpu = self.cluster.device
        return {
            "gpu": self.cluster.gpu,
            "gpus": self.cluster.nodes * self.cluster.gpus_per_node,
            "bf16_flops": gpu.bf16_flops,
            "memory_bytes": gpu.memory,
            "watts": self.cluster.watts,
            "pue": self.cluster.pue,
            "source": gpu.source,
        }


def estimate(graph: Graph, pipeline: Pipeline, store: Store) -> Estimates:
    """The estimates of all stages that train, sample or score."""
    cluster, records = pipeline.cluster, Records(store, pipeline.name)
    duplicates = graph.duplicates
    nodes = [node for node in graph.nodes.values() if node.segment and node.name not in duplicates]
    measured = time_and_cost.measured_mfu(nodes, store, cluster, records)
    stages: dict[str, list[PartEstimate]] = {}
    for node in nodes:
        stages.setdefault(node.stage, []).append(part_estimate(node, cluster, measured))
    training = {name: StageEstimate(parts[0].node.kind, parts, cluster) for name, parts in stages.items()}
    known = Known(graph, store, records)
    asking = infer(known, cluster, measured)
    times = _spans(graph, training, asking, pipeline)
    return Estimates(cluster, training, asking, times, corpora_of(known), _loads(graph))


def _spans(
    graph: Graph,
    stages: dict[str, StageEstimate],
    inference: dict[str, StageInference],
    pipeline: Pipeline,
) -> dict[str, Span]:
    """The time span of each part; empty if the time of any part that trains is unknown."""
    cluster, training = pipeline.cluster, [part for stage in stages.values() for part in stage.parts]
    asking = [part for stage in inference.values() for part in stage.parts]
    if cluster is None or any(part.spent.seconds is None for part in training):
        return {}
    parts: list[PartEstimate | PartInference] = [*training, *asking]
    seconds = {part.node.name: part.spent.seconds for part in parts if part.spent.seconds is not None}
    nodes = {part.node.name: -(-part.gpus // cluster.gpus_per_node) for part in parts}
    return spans(graph, seconds, nodes, pipeline.concurrency, cluster.nodes)


def _loads(graph: Graph) -> list[int]:
    """The bytes of each read of a training checkpoint by a part: the weights, and the optimizer states if
    training continues with them, in the next segment of a phase or by `carry`."""
    duplicates, loads = graph.duplicates, []
    for node in graph.nodes.values():
        for checkpoint in node.inputs.values() if node.name not in duplicates else ():
            parent = graph.nodes[checkpoint.node] if checkpoint.node is not None else None
            if checkpoint.step is None or parent is None or parent.segment is None:
                continue
            own = node.segment
            chained = own is not None and (node.phase == parent.phase or "optimizer" in own.carry)
            size = storage.checkpoint_bytes if chained else storage.weight_bytes
            loads.append(size(parent.segment))
    return loads
