"""The checks of a recipe that need more than one of its fields.

Invariant: in a recipe without a problem every reference names a stage of the right kind, there is no cycle,
every breakpoint falls inside its stage, and every batch can be divided.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

from specs.dependencies import MODELS, order
from specs.errors import FieldPath, Problem, SpecError, a, did_you_mean, one_of
from specs.figures import misnamed
from specs.launch import Launch
from specs.layout import Misfit, misfits
from specs.model import ModelSpec
from specs.names import check_names, planted_sources, references
from specs.optimizer import refused_anomalies, refused_layout, refused_objective
from specs.pipeline import Pipeline
from specs.resolution import resolve
from specs.sources import CONVERSATIONAL, TOKENISED
from specs.sparse_attention import BACKENDS
from specs.stages.base import FromCheckpoint, Stage
from specs.stages.corpus import CorpusSource, CorpusStage
from specs.stages.distill import DistillStage
from specs.stages.evaluate import EvaluateStage
from specs.stages.memorisation import Memorisation
from specs.stages.mixture import MixtureStage
from specs.stages.preference_data import PreferenceSet
from specs.stages.select import SelectStage
from specs.stages.training import Phase, TrainingStage
from specs.trajectory import Trajectory, phase_of, phases


def check(pipeline: Pipeline, names: set[str], launches: bool = True) -> list[Problem]:
    """The problems that concern more than one field. `names` has all stages of the file; `pipeline` has only
    those whose own fields are valid, and None for an invalid source. `launches`: whether the launch settings
    of the pipeline are valid, so that layouts can be checked."""
    problems: list[Problem] = [*check_names(pipeline, names)]
    for name, stage in pipeline.stages.items():
        problems += _check_references(pipeline, name, stage)
        problems += _check_planted(pipeline, name, stage)
        if launches and isinstance(stage, TrainingStage):
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
        problems += _check_float8(pipeline, name, stage, trajectories)
    return problems + [_with(problem, _STAGES, ", ".join(affected)) for problem, affected in layouts.items()]


_STAGES = "{stages}"
"""The stages in a problem of a layout, which is one mistake however many stages share the layout."""


def _with(problem: Problem, old: str, new: str) -> Problem:
    return replace(problem, message=problem.message.replace(old, new), fix=problem.fix.replace(old, new))


def _check_planted(pipeline: Pipeline, name: str, stage: Stage) -> Iterator[Problem]:
    """Checks that the documents that a corpus plants are those of a source of text."""
    for path, source in planted_sources(name, stage):
        found = pipeline.sources.get(source)
        if found is not None and found.format in (*CONVERSATIONAL, *TOKENISED):
            message = f"source '{source}' has format {found.format}; what is planted is text"
            yield Problem(path, message, "name a source of text.")


def _check_references(pipeline: Pipeline, name: str, stage: Stage) -> Iterator[Problem]:
    for source, field in stage.source_fields().items():
        at: FieldPath = ("stages", name, *field)
        found = pipeline.sources.get(source)
        if found is None:  # reported by `check_names`, or wrong itself
            continue
        if (found.format in CONVERSATIONAL) != (stage.READS == "conversations"):
            wanted = ", ".join(CONVERSATIONAL) if stage.READS == "conversations" else stage.READS
            yield Problem(at, f"source '{source}' has format {found.format}; {a(stage.kind)} needs {wanted}")
        else:
            yield from stage.source_problems(source, found, at)
    for path, ref, kinds in references(name, stage):
        target = pipeline.stages.get(ref.stage)
        if target is None:  # as for sources
            continue
        if "not_in" in path and target.kind in kinds and target.kind != stage.kind:
            message = f"'{ref}' is a part of kind {target.kind}; here parts of kind {stage.kind} are compared"
            yield Problem(path, message, f"name a part of kind {stage.kind}.")
            continue
        if target.kind not in kinds:
            wanted = f"one of {', '.join(kinds)}" if len(kinds) > 1 else kinds[0]
            fitting = [one for one, other in pipeline.stages.items() if other.kind in kinds and one != name]
            message = f"stage '{ref.stage}' is {a(target.kind)}; {wanted} is needed here"
            yield Problem(path, message, one_of(fitting))
            continue
        if ref.selector and target.result() not in MODELS:
            message = f"'{ref}' names a step, but {a(target.kind)} such as '{ref.stage}' has no steps"
            yield Problem(path, message, f"write '{ref.target}'.")
            continue
        if ref.best is not None and not isinstance(target, (TrainingStage, SelectStage)):
            one = f"'{ref.stage}' is {a(target.kind)} and has one result"
            yield Problem(path, f"'{ref}' chooses by held-out loss, but {one}", f"write '{ref.stage}'.")
            continue
        if isinstance(target, MixtureStage) and isinstance(stage, MixtureStage) and target.anneal is not None:
            yield Problem(
                path,
                f"mixture '{ref.stage}' is annealed: its shares change during training",
                "name a constant mixture.",
            )
            continue
        if target.PART_PER_SOURCE:
            if ref.part is None and len(target.source_fields()) > 1:
                choice = ", ".join(f"{ref.stage}/{source}" for source in target.source_fields())
                yield Problem(path, f"{target.kind} '{ref.stage}' has several parts", f"name one: {choice}.")
            elif ref.part is not None and ref.part not in target.source_fields():
                yield Problem(
                    path,
                    f"{target.kind} '{ref.stage}' has no part '{ref.part}'",
                    did_you_mean(ref.part, target.source_fields()),
                )
            elif (
                path[-1] == "probes" and isinstance(target, CorpusStage) and isinstance(stage, EvaluateStage)
            ):
                assert stage.memorisation is not None, "it holds the reference"
                process = target.sources[ref.part or next(iter(target.sources))]
                yield from _check_probes(path, stage.memorisation, process)
            continue
        chooses = isinstance(stage, SelectStage) and ref in stage.checkpoints
        if (ref.best is not None or chooses) and any(
            not phase.training.validation.interval for phase in phases(pipeline, ref.stage)
        ):
            message = f"'{ref}' chooses by held-out loss, but '{ref.stage}' measures none"
            yield Problem(path, message, "give it a validation.interval.")
        if ref.part is not None:
            parts = [phase.name for phase in phases(pipeline, ref.stage) if phase.name != ref.stage]
            if f"{ref.stage}/{ref.part}" not in parts:
                fix = f"name one: {', '.join(parts)}." if parts else f"name '{ref.stage}'."
                yield Problem(path, f"'{ref.stage}' has no part '{ref.part}'", fix)


def _check_probes(path: FieldPath, memorisation: Memorisation, process: CorpusSource) -> Iterator[Problem]:
    """Checks that the part of a corpus has the probes that an evaluation asks for."""
    ref, planted, at = memorisation.probes, memorisation.planted, path[:-1]
    if planted is None and process.repeats is None:
        message = f"'{ref}' has no repeats:, so it has no probes"
        yield Problem(path, message, "give that source of the corpus a repeats:, or set planted.")
    elif planted is not None and planted not in process.planted:
        message = f"'{ref}' plants no '{planted}'"
        yield Problem((*at, "planted"), message, did_you_mean(planted, process.planted))
    elif memorisation.exposure and (planted is None or process.planted[planted].canaries is None):
        message = "only canaries have known alternatives, among which their exposure ranks them"
        yield Problem((*at, "exposure"), message, "set planted: with the name of canaries.")


def _check_batches(pipeline: Pipeline, name: str, stage: TrainingStage) -> Iterator[Problem]:
    launch = pipeline.launch_of(stage)
    if launch.mismatch is not None:  # reported by `_check_layout`
        return
    ranks = launch.data_parallel
    stated = [(phase.path, phase.training.global_batch_size) for phase in stage.phases(name)]
    pieces = [
        (path, begin, batch)
        for path, batches in stated
        if isinstance(batches, dict)
        for begin, batch in batches.items()
    ]
    for at, begin, batch in pieces:
        path: FieldPath = (*at, "global_batch_size", begin)
        if batch > 0 and batch % ranks:  # a smaller one is reported by `batch_pieces`
            fix = f"use a multiple of {ranks}, or other launch.processes."
            yield Problem(
                path,
                f"a batch of {batch} sequences cannot be divided among {ranks} data-parallel processes",
                fix,
            )


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
    if parallel.pp > 1 and (obstacle := stage.obstacle("pp")):
        message = f"'{name}' cannot run in a pipeline (pp {parallel.pp}): {obstacle}"
        yield Problem(
            (*at, "pp"),
            message,
            f"give '{name}' a launch.parallel of its own, with dp_shard, dp_replicate or cp.",
        )
    if parallel.tp > 1 and (obstacle := stage.obstacle("tp")):
        message = f"'{name}' cannot divide layers (tp {parallel.tp}): {obstacle}"
        yield Problem((*at, "tp"), message, f"give '{name}' a launch.parallel of its own, with dp_shard.")
    if parallel.cp > 1 and (obstacle := stage.obstacle("cp")):
        message = f"'{name}' cannot cut sequences (cp {parallel.cp}): {obstacle}"
        yield Problem((*at, "cp"), message, f"give '{name}' a launch.parallel of its own, with dp_shard.")
    found: list[Misfit] = []
    if isinstance(stage, TrainingStage):
        for phase in stage.phases(name):
            if phase.training.activation_checkpointing == "memory_budget" and not phase.training.compile:
                yield Problem(
                    (*phase.path, "activation_checkpointing"),
                    "memory_budget is what the compiler of a layer works to, and the layers are not compiled",
                    "set compile: true, or another activation_checkpointing.",
                )
            if parallel.async_tp and not phase.training.compile:
                yield Problem(
                    (*at, "async_tp"),
                    f"'{phase.name}': the compiler rewrites layers for async_tp, and they are not compiled",
                    f"set compile: true for '{phase.stage}', or leave out async_tp.",
                )
            if parallel.pp > 1 and phase.training.trainable:
                yield Problem(
                    (*at, "pp"),
                    f"'{phase.name}' trains some parameters alone, and a part of a pipeline may have none",
                    "use pp: 1.",
                )
            again = phase.training.activation_checkpointing in ("selective", "full")
            if parallel.tp > 1 and phase.training.compile and again:
                message = (
                    "torch 2.13 cannot compile layers with activation checkpointing under tensor parallelism"
                    f" (tp {parallel.tp})"
                )
                yield Problem(
                    (*phase.path, "compile"),
                    message,
                    "leave out compile, or set activation_checkpointing: none or memory_budget.",
                )
        teacher = (
            trajectories.get(phase_of(stage.teacher, trajectories))
            if isinstance(stage, DistillStage)
            else None
        )
        taught = [] if teacher is None else [teacher.model]
        for phase in stage.phases(name):
            optimizer = (
                trajectories[phase.name].settings.optimizer.name if phase.name in trajectories else None
            )
            if optimizer and (reason := refused_layout(optimizer, parallel, launch.world_size)):
                yield Problem((*phase.path, "optimizer", "name"), reason)
            if optimizer and (reason := refused_objective(optimizer, stage.objective)):
                yield Problem((*phase.path, "optimizer", "name"), reason)
            if optimizer and (reason := refused_anomalies(optimizer, phase.training.anomalies)):
                yield Problem((*phase.path, "optimizer", "name"), reason)
        for phase in stage.phases(name):
            if (trajectory := trajectories.get(phase.name)) is None:
                continue
            yield from _check_backend(phase, [trajectory.model, *taught])
            for segment in trajectory.segments:
                found += misfits(launch, trajectory.model, trajectory.settings.sequence_length, segment.batch)
        found += _of_teacher(launch, teacher)
    elif isinstance(stage, FromCheckpoint):
        parent = trajectories.get(phase_of(stage.from_, trajectories))
        found += misfits(launch, parent.model) if parent is not None else []
    for misfit in dict.fromkeys(found):
        yield Problem((*at, misfit.field), f"'{name}': {misfit.message}", misfit.fix)


def _check_backend(phase: Phase, models: Iterable[ModelSpec]) -> Iterator[Problem]:
    """Checks that the attention backend that a phase states computes the attention of its models."""
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
    if isinstance(stage, PreferenceSet) and stage.precision and stage.precision.linear != "param":
        message = "reference log-probabilities are not computed in float8: they depend on the rows of a batch"
        yield Problem(("stages", name, "precision", "linear"), message, "set linear: param.")
    for phase in stage.phases(name) if isinstance(stage, TrainingStage) else ():
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
        odd = [f"{what} = {size}" for what, size in sizes.items() if size % 16]
        cluster, obstacle = pipeline.cluster, stage.obstacle("float8")
        if not obstacle and odd:
            obstacle = f"float8 multiplies sizes in multiples of 16, not {', '.join(odd)}"
        elif not obstacle and cluster is not None and cluster.device.float8_flops is None:
            obstacle = f"the {cluster.gpu} of cluster.gpu has no float8; GPUs from the H100 on have it"
        if obstacle:
            fix = "set precision: {linear: param}" + (", or other sizes." if odd else ".")
            yield Problem(
                (*phase.path, "precision", "linear"),
                f"'{phase.name}' cannot train in {linear}: {obstacle}",
                fix,
            )
