"""Estimates sampling and scoring: the time, energy and cost of the parts that ask a model and train none.

    seconds = forward FLOPs / (MFU x peak x GPUs) + steps of decoding x seconds of each (`decode_time`)

With `mfu: measured`, the tokens per second of stored completions take precedence.

Invariant: as for training, a number that depends on an unknown one is None. What is not counted is named.
"""

from dataclasses import dataclass
from typing import Any

from apertus_model.rehearsal.rates import SHEETS, Rates
from flows.planning.estimate import time_and_cost
from flows.planning.estimate.decode_time import Replica, decode_seconds
from flows.planning.estimate.evaluation_work import EVALUATION
from flows.planning.estimate.sampling_work import SAMPLING
from flows.planning.estimate.work import Count, Known, ModelWork, NotCounted, weakest
from flows.planning.graph import Node
from specs.cluster import Cluster
from specs.launch import Launch
from specs.stages.base import Part

COUNTS: dict[type[Part], Count] = {**SAMPLING, **EVALUATION}
TOO_LARGE = "time, since the model does not fit its GPUs"
TOKENS = ("read_tokens", "sampled_tokens")


@dataclass(frozen=True)
class PartInference:
    """The estimate of one part that samples or scores."""

    node: Node
    work: ModelWork
    gpus: int
    time_source: str | None  # measured, roofline, or None where it is unknown
    spent: time_and_cost.Spent

    @property
    def flops(self) -> int:
        return self.work.forward_flops + self.work.decode_flops

    @property
    def alike(self) -> tuple[Any, ...]:
        """A key that is equal for parts that can share a line."""
        return (self.node.kind, self.gpus, self.work.source, self.work.missing)

    @property
    def counted(self) -> bool:
        """Whether at least some of its work is known."""
        return bool(self.work.requests)

    def to_json(self) -> dict[str, Any]:
        work = self.work
        numbers = {
            "requests": round(work.requests),
            "read_tokens": round(work.read_tokens),
            "sampled_tokens": round(work.sampled_tokens),
            "flops": self.flops,
        }
        return {
            "name": self.node.name,
            "kind": self.node.kind,
            **(numbers if self.counted else dict.fromkeys(numbers)),
            "tokens_source": work.source if self.counted else None,
            "not_counted": work.missing or None,
            "gpus": self.gpus,
            "time_source": self.time_source,
            **self.spent._asdict(),
        }


@dataclass(frozen=True)
class StageInference:
    """The parts of a stage that sample or score."""

    kind: str
    parts: list[PartInference]
    cluster: Cluster | None

    @property
    def gpus(self) -> int:
        """The most GPUs of any part."""
        return max(part.gpus for part in self.parts)

    @property
    def spent(self) -> time_and_cost.Spent:
        return spent_of(self.parts)

    def to_json(self) -> dict[str, Any]:
        parts = [part.to_json() for part in self.parts]
        counted = [part for part in self.parts if part.counted]
        sums = {
            name: sum(part[name] or 0 for part in parts) if counted else None
            for name in ("requests", *TOKENS, "flops")
        }
        return {
            "kind": self.kind,
            **sums,
            "tokens_source": weakest(part.work.source for part in counted) if counted else None,
            "not_counted": not_counted(self.parts),
            "gpus": self.gpus,
            "nodes": -(-self.gpus // self.cluster.gpus_per_node) if self.cluster else None,
            **self.spent._asdict(),
            "parts": parts,
        }


def spent_of(parts: list[PartInference]) -> time_and_cost.Spent:
    """The sum over the parts whose time is known."""
    return time_and_cost.Spent.of(part.spent for part in parts if part.spent.seconds is not None)


def not_counted(parts: list[PartInference]) -> list[str]:
    """Lines of the form `part: what is not counted`."""
    return [f"{part.node.name}: {part.work.missing}" for part in parts if part.work.missing]


def gpus_of(part: Part, launch: Launch, cluster: Cluster | None) -> int:
    """The GPUs of a part: one per process on the training engine, else those of all its workers."""
    if part.ON_ENGINE:
        return launch.world_size
    return workers_of(part, launch, cluster) * gpus_of_worker(part, launch)


def workers_of(part: Part, launch: Launch, cluster: Cluster | None) -> int:
    """The number of workers that share the units of a part: as many as the launch settings say, else as many
    as the GPUs of a node allow, which is the number that a run starts there (`apertus_model.work.local`)."""
    if not part.WORKERS:
        return 1
    there = cluster.gpus_per_node if cluster is not None else 0
    return launch.workers_of_node(there, gpus_of_worker(part, launch))


def gpus_of_worker(part: Part, launch: Launch) -> int:
    """The GPUs of each worker; a plan counts one even for a worker that uses none."""
    return part.gpus_of_worker(launch) or 1


def infer(known: Known, cluster: Cluster | None, measured: dict[str, float]) -> dict[str, StageInference]:
    """The estimates by stage, in the order of the plan; work that two parts share is counted with the first.
    `measured`: the MFU of stored training stages."""
    graph, stages = known.graph, dict[str, list[PartInference]]()
    duplicates = graph.duplicates
    for node in graph.nodes.values():
        if node.name not in duplicates and (work := work_of(known, node)) is not None:
            stages.setdefault(node.stage, []).append(_estimated(node, work, known, cluster, measured))
    kinds = {name: graph.of(name)[-1].kind for name in stages}
    return {name: StageInference(kinds[name], parts, cluster) for name, parts in stages.items()}


def work_of(known: Known, node: Node) -> ModelWork | None:
    """The work that a part asks of its model; None for a part that asks no model."""
    count = COUNTS.get(type(node.part))
    if count is None:
        return None
    try:
        return count(known, node)
    except NotCounted as error:
        return ModelWork(missing=str(error))


def _estimated(
    node: Node, work: ModelWork, known: Known, cluster: Cluster | None, measured: dict[str, float]
) -> PartInference:
    gpus, seconds, source = gpus_of(node.part, node.launch, cluster), None, None
    if cluster is not None and work.requests:
        seconds, source = _measured_seconds(node, work, known, cluster, gpus), "measured"
        if seconds is None:
            seconds, source = _seconds(node, work, cluster, measured, gpus), "roofline"
        if seconds is None and time_and_cost.utilisation(node, cluster, measured).value is not None:
            work = work._replace(missing="; ".join(filter(None, [work.missing, TOO_LARGE])))
    spent = time_and_cost.used(seconds, gpus, cluster)
    return PartInference(node, work, gpus, source if seconds is not None else None, spent)


def _seconds(
    node: Node, work: ModelWork, cluster: Cluster, measured: dict[str, float], gpus: int
) -> float | None:
    mfu = time_and_cost.utilisation(node, cluster, measured).value
    if mfu is None:
        return None
    peak = cluster.device.bf16_flops if work.width == 2 else SHEETS[cluster.gpu].float32_flops
    # layers that transformers divides among GPUs: one GPU computes at a time
    held = node.part.held_model
    one_by_one = held is not None and held.shared and not held.vllm
    idle = gpus_of_worker(node.part, node.launch) if one_by_one else 1
    seconds = work.forward_flops * idle / (mfu * peak * gpus)
    if (decoding := work.decoding) is None:
        return seconds
    workers = workers_of(node.part, node.launch, cluster)
    rates = Rates(cluster.gpu, cluster.gpus_per_node)
    replica = Replica(decoding.model, gpus // workers, work.width, rates)
    sequences = decoding.sequences / workers
    more = decode_seconds(replica, sequences, decoding.in_flight, decoding.prompt, decoding.tokens)
    return seconds + more * idle if more is not None else None


def _measured_seconds(node: Node, work: ModelWork, known: Known, cluster: Cluster, gpus: int) -> float | None:
    """The seconds of completions, by the tokens per second and GPU of a worker in their stored result or in
    that of the last run; None without such a measurement, or if an MFU is stated."""
    mfu_stated = cluster.mfu != "measured" or node.launch.mfu is not None
    if mfu_stated or node.kind != "completions":
        return None
    manifest = known.manifest(node)
    speed = manifest.metrics.get("tokens_per_second") if manifest is not None else None
    if manifest is None or not speed:
        return None
    try:
        then = gpus_of_worker(node.part, Launch.model_validate(manifest.execution.launch))
    except ValueError:
        return None
    return float(work.sampled_tokens * then / (speed * gpus))
