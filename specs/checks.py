"""The checks of a recipe that need more than one of its fields.

Invariant: in a recipe without a problem every reference names a stage of the right kind, there is no cycle,
every breakpoint falls inside its stage, and every batch can be divided.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Literal

from specs.cluster import Cluster
from specs.dependencies import MODELS, order
from specs.errors import FieldPath, Problem, SpecError, a, did_you_mean, one_of
from specs.figures import misnamed
from specs.launch import Launch, Parallel
from specs.layout import Misfit, misfits
from specs.model import ModelSpec
from specs.names import check_names, planted_sources, references
from specs.optimizer import refusals
from specs.pipeline import Pipeline
from specs.resolution import resolve
from specs.settings import Phase
from specs.sources import CONVERSATIONAL, TOKENISED
from specs.sparse_attention import BACKENDS
from specs.stages.base import Stage
from specs.trajectory import Trajectory, phase_of
from specs.units import Reference


def check(pipeline: Pipeline, names: set[str], launches: bool = True) -> list[Problem]:
    """The problems that concern more than one field. `names` has all stages of the file; `pipeline` has only
    those whose own fields are valid, and None for an invalid source. `launches`: whether the launch settings
    of the pipeline are valid, so that layouts can be checked."""
    problems: list[Problem] = [*check_names(pipeline, names)]
    for name, stage in pipeline.stages.items():
        problems += _check_references(pipeline, name, stage)
        problems += _check_planted(pipeline, name, stage)
        if launches:
            problems += _check_batches(pipeline, name, stage)
    problems += misnamed(pipeline.figures, names)
    trajectories: dict[str, Trajectory] = {}
    try:
        wrong = {str(problem.path[1]) for problem in problems if problem.path[0] == "stages"}
        trajectories = resolve(pipeline, order(pipeline, wrong))
    except SpecError as error:
        problems += error.problems
    layouts: dict[Problem, list[str]] = {}
    for name, stage in pipeline.stages.items() if launches else ():
        for problem in _check_layout(pipeline, name, stage, trajectories):
            layouts.setdefault(_with(problem, f"'{name}'", _STAGES), []).append(f"'{name}'")
        problems += stage.field_problems(("stages", name))
        problems += _check_float8(pipeline, name, stage, trajectories)
    return problems + [_with(problem, _STAGES, ", ".join(affected)) for problem, affected in layouts.items()]


_STAGES = "{stages}"
"""The stages in a problem of a layout, which is one mistake however many stages share the layout."""


def _with(problem: Problem, old: str, new: str) -> Problem:
    return replace(problem, message=problem.message.replace(old, new), fix=problem.fix.replace(old, new))


def _check_planted(pipeline: Pipeline, name: str, stage: Stage) -> Iterator[Problem]:
    """Checks that the documents that a corpus plants are those of a source of text."""
    for path, source in planted_sources(name, stage):
        texts = pipeline.sources.get(source)
        if texts is not None and texts.format in (*CONVERSATIONAL, *TOKENISED):
            message = f"source '{source}' has format {texts.format}; what is planted is text"
            yield Problem(path, message, "name a source of text.")


def _check_references(pipeline: Pipeline, name: str, stage: Stage) -> Iterator[Problem]:
    for source, field in stage.source_fields().items():
        at: FieldPath = ("stages", name, *field)
        entry = pipeline.sources.get(source)
        if entry is None:  # reported by `check_names`, or wrong itself
            continue
        if (entry.format in CONVERSATIONAL) != (stage.READS == "conversations"):
            wanted = ", ".join(CONVERSATIONAL) if stage.READS == "conversations" else stage.READS
            yield Problem(at, f"source '{source}' has format {entry.format}; {a(stage.kind)} needs {wanted}")
        else:
            yield from stage.source_problems(source, entry, at)
    for path, ref, kinds in references(name, stage):
        target = pipeline.stages.get(ref.stage)
        if target is None:  # as for sources
            continue
        if (problem := _check_reference(pipeline, name, path, ref, kinds)) is not None:
            yield problem
            continue
        unmeasured = any(not phase.training.validation.interval for phase in target.phases(ref.stage))
        if unmeasured and stage.chooses_by_loss(ref):
            message = f"'{ref}' chooses by held-out loss, but '{ref.stage}' measures none"
            yield Problem(path, message, "give it a validation.interval.")
        yield from stage.part_problems(path, ref, target)


def _check_reference(
    pipeline: Pipeline, name: str, path: FieldPath, ref: Reference, kinds: tuple[str, ...]
) -> Problem | None:
    """The problem of what a reference names: a stage, whose kind is not one of `kinds`, a step or a part."""
    stage, target = pipeline.stages[name], pipeline.stages[ref.stage]
    if "not_in" in path and target.kind in kinds and target.kind != stage.kind:
        message = f"'{ref}' is a part of kind {target.kind}; here parts of kind {stage.kind} are compared"
        return Problem(path, message, f"name a part of kind {stage.kind}.")
    if target.kind not in kinds:
        wanted = f"one of {', '.join(kinds)}" if len(kinds) > 1 else kinds[0]
        fitting = [other for other, its in pipeline.stages.items() if its.kind in kinds and other != name]
        message = f"stage '{ref.stage}' is {a(target.kind)}; {wanted} is needed here"
        return Problem(path, message, one_of(fitting))
    if ref.selector and target.result() not in MODELS:
        message = f"'{ref}' names a step, but {a(target.kind)} such as '{ref.stage}' has no steps"
        return Problem(path, message, f"write '{ref.target}'.")
    if ref.best is not None and not target.MEASURES_LOSS:
        message = f"'{ref}' chooses by held-out loss, but '{ref.stage}' is {a(target.kind)}"
        return Problem(path, f"{message} and has one result", f"write '{ref.stage}'.")
    return _check_part(path, ref, target)


def _check_part(path: FieldPath, ref: Reference, target: Stage) -> Problem | None:
    """The problem of a reference that names a part that its stage does not have, or no part of several."""
    if target.PART_PER_SOURCE:
        parts = list(target.source_fields())
        if ref.part is None and len(parts) > 1:
            choice = ", ".join(f"{ref.stage}/{source}" for source in parts)
            return Problem(path, f"{target.kind} '{ref.stage}' has several parts", f"name one: {choice}.")
        if ref.part is not None and ref.part not in parts:
            message = f"{target.kind} '{ref.stage}' has no part '{ref.part}'"
            return Problem(path, message, did_you_mean(ref.part, parts))
    elif ref.part is not None:
        phases = [phase.name for phase in target.phases(ref.stage) if phase.name != ref.stage]
        if f"{ref.stage}/{ref.part}" not in phases:
            fix = f"name one: {', '.join(phases)}." if phases else f"name '{ref.stage}'."
            return Problem(path, f"'{ref.stage}' has no part '{ref.part}'", fix)
    return None


def _check_batches(pipeline: Pipeline, name: str, stage: Stage) -> Iterator[Problem]:
    launch = pipeline.launch_of(stage)
    if launch.mismatch is not None:  # reported by `_check_layout`
        return
    ranks = launch.data_parallel
    for phase in stage.phases(name):
        batches = phase.training.global_batch_size
        for begin, batch in batches.items() if isinstance(batches, dict) else ():
            if batch > 0 and batch % ranks:  # a smaller one is reported by `batch_pieces`
                message = f"a batch of {batch} sequences cannot be divided among {ranks} data-parallel"
                fix = f"use a multiple of {ranks}, or other launch.processes."
                path = (*phase.path, "global_batch_size", begin)
                yield Problem(path, f"{message} processes", fix)


def _check_layout(
    pipeline: Pipeline, name: str, stage: Stage, trajectories: Mapping[str, Trajectory]
) -> Iterator[Problem]:
    """Checks that a stage that runs on the training engine can run in its layout."""
    if not stage.IN_LAYOUT:
        return
    launch = pipeline.launch_of(stage)
    parallel = launch.degrees
    at: FieldPath = (*(() if stage.launch.parallel is None else ("stages", name)), "launch", "parallel")
    if launch.mismatch is not None:
        yield Problem(at, f"'{name}': {launch.mismatch}", "change launch.processes or a degree.")
        return
    divided: dict[Literal["pp", "tp", "cp"], str] = {
        "pp": "run in a pipeline",
        "tp": "divide layers",
        "cp": "cut sequences",
    }
    for degree, what in divided.items():
        if (number := getattr(parallel, degree)) > 1 and (obstacle := stage.obstacle(degree)):
            others = "dp_shard, dp_replicate or cp" if degree == "pp" else "dp_shard"
            message = f"'{name}' cannot {what} ({degree} {number}): {obstacle}"
            yield Problem(
                (*at, degree), message, f"give '{name}' a launch.parallel of its own, with {others}."
            )
    parent, teacher = (
        None if ref is None else trajectories.get(phase_of(ref, trajectories))
        for ref in (stage.read_model, stage.teacher_model)
    )
    uneven = list(_of_teacher(launch, teacher))
    phases = stage.phases(name)
    if not phases and parent is not None:
        uneven += misfits(launch, parent.model)
    for phase in phases:
        trajectory = trajectories.get(phase.name)
        yield from _check_recomputation(phase, trajectory, parallel, at)
        if trajectory is None:
            continue
        optimizer = trajectory.settings.optimizer.name
        assert optimizer is not None, "resolved"
        anomalies, world = phase.training.anomalies, launch.world_size
        for reason in refusals(optimizer, stage.objective, anomalies, parallel, world):
            yield Problem((*phase.path, "optimizer", "name"), reason)
        yield from _check_backend(phase, [trajectory.model, *([teacher.model] if teacher else [])])
        for segment in trajectory.segments:
            uneven += misfits(launch, trajectory.model, trajectory.settings.sequence_length, segment.batch)
    for misfit in dict.fromkeys(uneven):
        yield Problem((*at, misfit.field), f"'{name}': {misfit.message}", misfit.fix)


def _check_recomputation(
    phase: Phase, trajectory: Trajectory | None, parallel: Parallel, at: FieldPath
) -> Iterator[Problem]:
    """Checks that what a phase recomputes, compiles and trains is possible in a layout, stated at `at`."""
    training = phase.training
    mamba = trajectory.model.mamba if trajectory else None
    if training.activation_checkpointing == "selective" and mamba and not mamba.decay:
        message = "the memory of selective recomputation is not known for layers of mamba without decay"
        yield Problem((*phase.path, "activation_checkpointing"), message, "set full or none.")
    if training.activation_checkpointing == "memory_budget" and not training.compile:
        message = "memory_budget is what the compiler of a layer works to, and the layers are not compiled"
        fix = "set compile: true, or another activation_checkpointing."
        yield Problem((*phase.path, "activation_checkpointing"), message, fix)
    if parallel.async_tp and not training.compile:
        message = f"'{phase.name}': the compiler rewrites layers for async_tp, and they are not compiled"
        fix = f"set compile: true for '{phase.stage}', or leave out async_tp."
        yield Problem((*at, "async_tp"), message, fix)
    if parallel.pp > 1 and training.trainable:
        message = f"'{phase.name}' trains some parameters alone, and a part of a pipeline may have none"
        yield Problem((*at, "pp"), message, "use pp: 1.")
    if parallel.tp > 1 and training.compile and training.activation_checkpointing in ("selective", "full"):
        message = (
            "torch 2.13 cannot compile layers with activation checkpointing under tensor parallelism"
            f" (tp {parallel.tp})"
        )
        fix = "leave out compile, or set activation_checkpointing: none or memory_budget."
        yield Problem((*phase.path, "compile"), message, fix)


def _check_backend(phase: Phase, models: Iterable[ModelSpec]) -> Iterator[Problem]:
    """Checks that the attention backend that a phase states fits its models."""
    backend, path = phase.training.attention, (*phase.path, "attention")
    for model in models:
        if model.attention is not None and backend not in ("auto", *BACKENDS):
            message = (
                f"'{phase.name}': {backend} computes whole documents, and model.attention (sparse:"
                f" {model.attention.sparse}) chooses keys in every head"
            )
            yield Problem(path, message, f"set attention: auto, {' or '.join(BACKENDS)}.")
        if model.method is not None and model.reads_earlier_keys and backend not in ("auto", "sdpa"):
            message = (
                f"'{phase.name}': with model.{model.method[0]}, layers read the keys of earlier passes, for"
                f" which {backend} has no mask"
            )
            yield Problem(path, message, "set attention: auto or sdpa.")


def _of_teacher(launch: Launch, teacher: Trajectory | None) -> Iterator[Misfit]:
    """The degrees of parallelism that a teacher, which no pipeline divides, does not allow."""
    if teacher is not None:
        whole = launch.model_copy(update={"parallel": launch.degrees.without_pipeline})
        for misfit in misfits(whole, teacher.model):
            yield misfit._replace(message=f"of its teacher, {misfit.message}")


def _check_float8(
    pipeline: Pipeline, name: str, stage: Stage, trajectories: Mapping[str, Trajectory]
) -> Iterator[Problem]:
    """Checks that the linear layers of a stage can multiply in float8, if it states or inherits that."""
    for phase in stage.phases(name):
        trajectory = trajectories.get(phase.name)
        if trajectory is None or (linear := trajectory.settings.precision.linear) == "param":
            continue
        model, launch = trajectory.model, pipeline.launch_of(stage)
        tp, tokens = launch.tensor_parallel, trajectory.settings.sequence_length // launch.degrees.cp
        sizes = {
            "model.dim": model.dim,
            f"query heads x head_dim / tp {tp}": model.query_dim // tp,
            f"key heads x head_dim / tp {tp}": model.key_dim // tp,
            f"model.ffn_dim / tp {tp}": model.ffn_dim // tp,
            "tokens of a sequence on a process": tokens,
        }
        unit = 32 if linear == "mxfp8" else 16
        odd = [f"{what} = {size}" for what, size in sizes.items() if size % unit]
        cluster, obstacle = pipeline.cluster, stage.obstacle("float8")
        if not obstacle and odd:
            obstacle = f"{linear} multiplies sizes in multiples of {unit}, not {', '.join(odd)}"
        elif not obstacle and cluster is not None and cluster.device.float8_flops is None:
            obstacle = f"the {cluster.gpu} of cluster.gpu has no float8; GPUs from the H100 on have it"
        elif not obstacle and linear == "mxfp8":
            obstacle = _obstacle_to_mxfp8(trajectory.settings.precision.param, launch, cluster)
        if obstacle:
            fix = "set precision: {linear: param}" + (", or other sizes." if odd else ".")
            message = f"'{phase.name}' cannot train in {linear}: {obstacle}"
            yield Problem((*phase.path, "precision", "linear"), message, fix)


def _obstacle_to_mxfp8(param: str, launch: Launch, cluster: Cluster | None) -> str:
    """Why layers cannot multiply in MXFP8 although they could in float8, or ''."""
    if launch.tensor_parallel > 1:
        return (
            f"torchtitan 0.3.0's layer for it returns whole sums, and tp {launch.tensor_parallel} adds parts"
        )
    if cluster is not None and not cluster.device.mxfp8:
        return f"the {cluster.gpu} of cluster.gpu has no MX formats; GPUs from the B200 on have them"
    if cluster is not None and param != "bfloat16":
        return f"a GPU returns its products in bfloat16, and precision.param is {param}"
    return ""
