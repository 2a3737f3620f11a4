"""Checks of resources: memory, checkpoints, GPUs. They need a `cluster:` in the recipe."""

import math
from collections.abc import Iterator
from itertools import product
from typing import Any

from flows.planning.advice.given import Advice, Context
from flows.planning.estimate.memory import memory_of_step
from flows.planning.estimate.storage import NOTICED
from flows.planning.estimate.time_and_cost import Spent
from flows.planning.estimate.training import PartEstimate
from specs.launch import Launch
from specs.layout import misfits
from specs.stages.export import ExportPart
from specs.stages.hugging_face import ModelFolderPart
from specs.stages.training import Segment

# accepted factor from the best interval, up or down; the expected loss is up to about 1.7 times the least
FAR = 3.0
LEAST_SECONDS = 3600.0  # least time of sampling or scoring that is worth advice
LONG_SECONDS = 7 * 86400.0  # longest time of a corpus without advice
# for each kind of recomputation, the kinds that need no more memory
RECOMPUTATION = {
    "none": ("none", "selective", "full"),
    "selective": ("selective", "full"),
    "full": ("full",),
    "memory_budget": ("memory_budget", "full"),
}


def checkpoint_interval(context: Context) -> Iterator[Advice]:
    for name, stage in context.estimates.stages.items():
        part = stage.costliest
        saving = part.saving
        interval, best, lost, longest = saving.interval, saving.best, saving.lost, saving.longest
        if not part.lost_seconds or interval is None or best is None or lost is None or longest is None:
            continue
        if not best / FAR <= interval <= best * FAR and lost > NOTICED:
            rare = interval > best
            steps = max(1, int((longest if rare else best) / (part.step_seconds or 1.0)))
            yield Advice(
                "checkpoint-interval",
                name,
                f"'{part.node.name}' saves every {interval:,.0f} s, which with the failures of this cluster "
                f"takes {lost:.1%} more time than the optimum of {best:,.3g} s, for a stall of "
                f"{saving.copy:,.2g} s and {saving.upload:,.2g} s of writing; checkpoint.interval {steps:,} "
                f"{f'loses {NOTICED:.0%}' if rare else 'is the optimum'}",
                {
                    "interval_seconds": interval,
                    "young_daly_seconds": best,
                    "copy_seconds": saving.copy,
                    "write_seconds": saving.upload,
                    "lost": lost,
                    "interval_steps": steps,
                },
            )


def cluster_size(context: Context) -> Iterator[Advice]:
    cluster = context.estimates.cluster
    if cluster is None:
        return
    there = cluster.nodes * cluster.gpus_per_node
    for name, stage in context.estimates.stages.items():
        asked = max(part.gpus for part in stage.parts)
        if asked > there:
            yield Advice(
                "cluster-size",
                name,
                f"needs {asked:,} processes, one per GPU; {cluster.nodes:,} nodes of "
                f"{cluster.gpus_per_node} have {there:,}: raise cluster.nodes, or lower launch.processes",
                {"processes": asked, "gpus": there},
            )
    for node in context.graph.nodes.values():
        shared = node.launch.tensor_parallel
        held = node.part.held_model
        if held is not None and held.shared and shared > cluster.gpus_per_node:
            yield Advice(
                "cluster-size",
                node.stage,
                f"{node.name} is one process that shares the model among {shared} GPUs of its node, and a"
                f" node has {cluster.gpus_per_node}: set launch.parallel.tp: {cluster.gpus_per_node} or"
                f" less for '{node.stage}'",
                {"processes": shared, "gpus": cluster.gpus_per_node},
            )


def slow_inference(context: Context) -> Iterator[Advice]:
    """Advises on stages that sample or score for longer than all training stages, one after the other."""
    estimates = context.estimates
    training = Spent.of(stage.spent for stage in estimates.stages.values()).seconds
    for name, stage in estimates.inference.items() if training else ():
        seconds = stage.spent.seconds
        if training is None or seconds is None or seconds <= max(training, LEAST_SECONDS):
            continue
        part = max(stage.parts, key=lambda part: part.spent.seconds or 0.0)
        spent = part.spent.seconds or 0.0
        fix, enough = "ask for less of it, or use engine: vllm", None
        if part.node.part.ON_ENGINE:
            enough = 2 ** math.ceil(math.log2(part.gpus * seconds / training))
            fix = f"launch.processes: {enough} would take {spent * part.gpus / enough / 3600:,.3g} h"
        yield Advice(
            "slow-inference",
            name,
            f"'{part.node.name}' takes {spent / 3600:,.3g} h on {part.gpus} GPUs, and all training"
            f" {training / 3600:,.3g} h; {fix}",
            {
                "seconds": seconds,
                "training_seconds": training,
                "gpus": part.gpus,
                "processes": enough,
            },
        )


def slow_corpus(context: Context) -> Iterator[Advice]:
    """Advises on corpora that take the workers stated in the recipe over a week."""
    for name, work in context.estimates.corpora.items():
        if work.seconds is None or work.seconds <= LONG_SECONDS:
            continue
        workers = max(part.workers or 0 for part in work.parts)
        enough = math.ceil(workers * work.seconds / LONG_SECONDS)
        yield Advice(
            "slow-corpus",
            name,
            f"'{name}' takes {work.core_hours:,.3g} core-hours, {work.seconds / 86400:,.3g} days of"
            f" {workers:,} workers; launch.workers.count: {enough:,} would take a week",
            {"core_hours": work.core_hours, "seconds": work.seconds, "workers": workers, "enough": enough},
        )


def gpu_memory(context: Context) -> Iterator[Advice]:
    cluster = context.estimates.cluster
    if cluster is None:
        return
    limit = cluster.device.memory
    for name, stage in context.estimates.stages.items():
        part = stage.largest
        need = part.memory.total
        if need <= limit:
            continue
        nearest = nearest_that_fits(part, limit, cluster.gpus_per_node)
        fix = "no setting fits on as many GPUs; use more of them"
        if nearest is not None:
            fix = _needs(*nearest)
        yield Advice(
            "gpu-memory",
            name,
            f"needs {need / 1e9:.1f} GB on each {cluster.gpu}, which has {limit / 1e9:.0f} GB; {fix}",
            {
                "memory_bytes": round(need),
                "memory_limit_bytes": round(limit),
                "nearest": nearest[0] if nearest else None,
            },
        )


def sampling_memory(context: Context) -> Iterator[Advice]:
    """Advises on parts whose processes each hold a whole model that does not fit. Only its weights are
    counted: in bfloat16 for vLLM, as exported for the other engines, and as stored for a folder of another
    architecture. Models outside the store are not counted."""
    cluster = context.estimates.cluster
    if cluster is None:
        return
    limit = cluster.device.memory
    for node in context.graph.nodes.values():
        held = node.part.held_model
        name = node.inputs[held.role].node if held is not None else None
        if held is None or name is None:
            continue
        model = context.graph.nodes[name].part
        if isinstance(model, ModelFolderPart):
            known = 2 * model.shape.parameters if model.shape is not None else 0
            halves = weights = model.weight_bytes or known
        else:
            assert isinstance(model, ExportPart)
            halves = model.model.parameters * 2
            weights = halves if held.vllm or model.dtype == "bfloat16" else 2 * halves
        need = weights / node.launch.tensor_parallel if held.shared else weights
        if need <= limit:
            continue
        wanted = weights if held.shared else halves
        degrees = [tp for tp in (1, 2, 4, 8, 16) if tp <= cluster.gpus_per_node and wanted / tp <= limit]
        enough = degrees[0] if degrees else None
        settings: dict[str, Any] = {} if held.shared else {"engine": "vllm"}
        settings |= {} if enough is None else {"launch.parallel.tp": enough}
        fix = _needs(settings, wanted / (enough or 1))
        if held.role == "reward_model":
            fix, enough = "its layers cannot be divided among GPUs; use a smaller reward model", None
        elif enough is None:
            fix = f"all {cluster.gpus_per_node} of a node together are too small"
        yield Advice(
            "gpu-memory",
            node.stage,
            f"{node.name} needs {need / 1e9:.1f} GB for the weights alone on each {cluster.gpu}, which has"
            f" {limit / 1e9:.0f} GB; {fix}",
            {
                "memory_bytes": round(need),
                "memory_limit_bytes": round(limit),
                "nearest": settings if enough else None,
            },
        )


def _needs(settings: dict[str, Any], size: float) -> str:
    text = ", ".join(f"{field}: {value}" for field, value in settings.items())
    return f"{text} needs {size / 1e9:.1f} GB"


def nearest_that_fits(
    part: PartEstimate, limit: float, gpus_per_node: int
) -> tuple[dict[str, Any], float] | None:
    """The settings to change so that a segment fits into `limit` bytes on the same number of processes, and
    the bytes that it then needs. The cheapest come first: smaller micro-batches, then weights shared by more
    processes, then recomputation, then tensor parallelism up to a node; at the same cost, the fewest
    changes."""
    segment, launch = part.segment, part.node.launch
    parallel = segment.parallel
    share = max(1, segment.global_batch_size // launch.data_parallel)
    micro = min(segment.micro_batch_size or share, share)
    sizes = sorted({size for size in (1, 2, 4, 8, 16, 32, 64, micro) if size <= micro}, reverse=True)
    again = RECOMPUTATION[segment.activation_checkpointing]
    degrees = [tp for tp in (1, 2, 4, 8, 16) if parallel.tp <= tp <= max(gpus_per_node, parallel.tp)]
    copies = sorted({parallel.dp_replicate, 1}, reverse=True)
    for tp, recomputed, replicas, size in product(degrees, again, copies, sizes):
        split = parallel.sequence_parallel or tp > parallel.tp
        degrees_of = {"tp": tp, "sequence_parallel": split, "dp_replicate": replicas, "dp_shard": -1}
        layout = parallel.model_copy(update=degrees_of)
        if not _runs(launch.model_copy(update={"parallel": layout}), segment):
            continue
        changes = {"parallel": layout, "micro_batch_size": size, "activation_checkpointing": recomputed}
        need = memory_of_step(segment.model_copy(update=changes), launch.world_size).total
        if need <= limit:
            settings: dict[str, Any] = {}
            if size != micro:
                settings["micro_batch_size"] = size
            if recomputed != segment.activation_checkpointing:
                settings["activation_checkpointing"] = recomputed
            if replicas != parallel.dp_replicate:
                settings["launch.parallel.dp_shard"] = launch.world_size // (tp * parallel.cp * parallel.pp)
            if tp != parallel.tp:
                settings |= {"launch.parallel.tp": tp, "launch.parallel.sequence_parallel": True}
            return settings, need
    return None


def _runs(launch: Launch, segment: Segment) -> bool:
    """Whether a layout passes the checks of a recipe."""
    each = launch.data_parallel * segment.separate_gradients
    if launch.mismatch is not None or segment.global_batch_size % each:
        return False
    return not any(misfits(launch, segment.model, segment.sequence_length, segment.global_batch_size))
