"""The whole recipe: sources, launch settings and named stages, and the checks that need more than one of them.

Invariant: a `Pipeline` that `load` returns can be planned: every reference leads to a stage of the right kind, there is no cycle, every
border falls inside its stage, and every batch can be divided. All problems of a file are reported at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Union

from pydantic import Discriminator, PrivateAttr, StringConstraints, Tag, TypeAdapter, ValidationError

from specs.advice import Silenced
from specs.base import Spec, execution, reference
from specs.cluster import Cluster
from specs.compose import compose, distinct
from specs.document import Document
from specs.elsewhere import Elsewhere
from specs.errors import FieldPath, Problem, SpecError, a, nearest
from specs.explain import explain, kind_of
from specs.figures import FigureSpec, misnamed
from specs.launch import Launch, Parallel, Retries
from specs.layout import Misfit, misfits
from specs.optimizer import refused_layout, refused_objective
from specs.sources import CONVERSATIONAL, TOKENISED, SourceSpec
from specs.stages import STAGES
from specs.stages.base import FromCheckpoint, Stage
from specs.stages.conversations import ConversationsStage
from specs.stages.corpus import CorpusStage, needs_text
from specs.stages.evaluate import EvaluateStage
from specs.stages.export import ExportStage
from specs.stages.merge import MergeStage
from specs.stages.mixture import MixtureStage
from specs.stages.preference_data import PreferenceDataStage
from specs.stages.preference_training import PreferenceTraining
from specs.stages.probe import ProbeStage
from specs.stages.select import SelectStage
from specs.stages.sft import SftStage
from specs.stages.tokenizer import TokenizerStage
from specs.stages.training import MixtureTraining, TrainingStage
from specs.tracking import Tracking
from specs.trajectory import Trajectory, leg_of, legs, resolve
from specs.units import LARGEST, Reference

Name = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$", max_length=100)]
"""Of a pipeline, source, stage or figure: files are named after it, and a name of theirs has at most 255 bytes."""
DEFAULT_STORE = "apertus-store"
TRAINING = tuple(kind for kind, stage in STAGES.items() if issubclass(stage, TrainingStage))
CHECKPOINTS = (*TRAINING, "merge", "select")  # kinds whose results are checkpoints


if TYPE_CHECKING:
    AnyStage = Stage
else:
    _kinds = tuple(Annotated[stage, Tag(kind)] for kind, stage in STAGES.items())
    AnyStage = Annotated[Union[_kinds], Discriminator(kind_of)]  # noqa: UP007  # a union made from the registry


class Pipeline(Spec):
    """A recipe. `stages` may stand in any order; what they consume decides."""

    name: Name = execution()
    description: str = execution("")
    store: str = execution(DEFAULT_STORE, description="folder or fsspec URL of the artifact store; --store and APERTUS_STORE win over it")
    launch: Launch = execution(default_factory=Launch)
    retries: Retries = execution(default_factory=Retries)
    tracking: Tracking = execution(default_factory=Tracking)
    cluster: Cluster | None = execution(None, description="what `plan` estimates hours, energy, cost and memory for")
    silence: Silenced = execution(default_factory=list, description="codes of advice (docs/advice.md) that is not to be given")
    concurrency: int = execution(1, ge=1, le=1024, description="stages that may run at the same time")
    sources: dict[Name, SourceSpec] = reference(default_factory=dict)
    elsewhere: Elsewhere = execution(default_factory=Elsewhere, description="what a plan may do without, beside sources that are declared")
    stages: dict[Name, AnyStage] = reference(min_length=1)
    figures: dict[Name, FigureSpec] = execution(default_factory=dict, description="what the report draws of the results")

    _document: Document | None = PrivateAttr(None)

    def located(self, error: SpecError) -> SpecError:
        """The same error, each problem with the file and line of its field."""
        document = self._document
        if document is None:
            return error
        return SpecError([replace(problem, where=problem.where or document.where(problem.path)) for problem in error.problems])

    def family(self, stage: str) -> str:
        """The stage with a matrix that a stage is a variant of; else its own name."""
        variants = self._document.variants if self._document is not None else {}
        return next((name for name, made in variants.items() if stage in made), stage)

    def launch_of(self, stage: Stage) -> Launch:
        """The stage's launch over the pipeline's, with the defaults filled in."""
        stated = stage.launch.over(self.launch)
        return stated.over(Launch(processes=1, threads=max(1, 2 // stated.world_size), workers=2))


def load(path: str | Path, overrides: Iterable[str] = ()) -> Pipeline:
    """Reads, composes, overrides and checks a recipe. SpecError with every problem found."""
    return validate(compose(path, overrides))


def validate(document: Document) -> Pipeline:
    """The pipeline of a document. SpecError with every problem found: of the fields first, of their relations when the fields are right."""
    problems: list[Problem] = []
    try:
        pipeline = Pipeline.model_validate(document.data)
    except ValidationError as error:
        problems = [explain(Pipeline, document, details) for details in error.errors()]
        pipeline = _what_is_right(document.data)
    refused = {problem.path for problem in problems}
    problems += [problem for problem in _too_large(document) if problem.path not in refused]
    pipeline._document = document
    problems += [replace(found, where=document.where(found.path)) for found in check(pipeline, _names(document.data))]
    problems = distinct(document, problems)
    if problems:
        raise SpecError(problems)
    return pipeline


def _too_large(document: Document) -> Iterator[Problem]:
    """Integers of a document that are no index, size or count of 64 bits, whatever their field allows."""
    places: list[tuple[FieldPath, Any]] = [((), document.data)]
    while places:
        path, value = places.pop()
        if isinstance(value, int) and abs(value) > LARGEST:
            fix = f"state a number from -{LARGEST} to {LARGEST}."
            yield Problem(path, f"{value} does not fit into 64 bits", fix, document.where(path))
        if isinstance(value, (dict, list)):
            inside = value.items() if isinstance(value, dict) else enumerate(value)
            places += [((*path, key), item) for key, item in inside]


def _names(data: dict[str, Any]) -> set[str]:
    """Names of all stages of a document, right or wrong."""
    stages = data.get("stages")
    return set(stages) if isinstance(stages, dict) else set()


def _what_is_right(data: dict[str, Any]) -> Pipeline:
    """The stages and settings of a wrong document that are right taken alone, so that their relations can be checked too."""

    def valid(kind: Any, value: Any, default: Any) -> Any:
        try:
            return TypeAdapter(kind).validate_python(value)
        except ValidationError:
            return default

    stages, sources = (value if isinstance(value := data.get(name), dict) else {} for name in ("stages", "sources"))
    right = {name: stage for name, value in stages.items() if (stage := valid(AnyStage, value, None)) is not None}
    read = {name: valid(SourceSpec, value, None) for name, value in sources.items()}
    return Pipeline.model_construct(name="", launch=valid(Launch, data.get("launch", {}), Launch()), sources=read, stages=right)


# Relations between stages


def checkpoints(name: str, stage: Stage) -> Iterator[tuple[FieldPath, Reference]]:
    """Where a stage names a checkpoint or a Hugging Face model, and which."""
    if isinstance(stage, FromCheckpoint):
        yield ("stages", name, "from"), stage.from_
    if isinstance(stage, (MergeStage, SelectStage)):
        for index, checkpoint in enumerate(stage.checkpoints):
            yield ("stages", name, "checkpoints", index), checkpoint
    if isinstance(stage, TokenizerStage) and stage.from_ is not None:
        yield ("stages", name, "from"), stage.from_


def uses(name: str, stage: Stage) -> Iterator[tuple[FieldPath, Reference, tuple[str, ...]]]:
    """Every reference of a stage to another: where it stands, what it names, and the kinds it may lead to."""
    at: FieldPath = ("stages", name)
    for path, ref in checkpoints(name, stage):
        if ref.hugging_face is None:
            yield path, ref, CHECKPOINTS
    if isinstance(stage, (CorpusStage, ConversationsStage)):
        yield (*at, "tokenizer"), stage.tokenizer, ("tokenizer",)
    if isinstance(stage, MixtureStage):
        for field, weights in (("weights", stage.weights), ("proportional", stage.proportional)):
            for source in weights or {}:
                yield (*at, field, source), Reference.parse(source), ("corpus", "mixture") if field == "weights" else ("corpus",)
        for source in stage.anneal.to if stage.anneal else {}:
            yield (*at, "anneal", "to", source), Reference.parse(source), ("corpus", "mixture")
    if isinstance(stage, TrainingStage):
        for leg in stage.legs(name):
            if isinstance(leg.settings, MixtureTraining):
                for begin, mixture in leg.settings.mixture.items():
                    yield (*leg.path, "mixture", begin), Reference.parse(mixture), ("mixture",)
    if isinstance(stage, SftStage):
        for part in stage.conversations:
            yield (*at, "conversations", part), Reference.parse(part), ("conversations",)
    if isinstance(stage, PreferenceDataStage):
        for index, prompts in enumerate(stage.prompts):
            yield (*at, "prompts", index), prompts, ("conversations",)
    if isinstance(stage, PreferenceTraining):
        yield (*at, "preferences"), stage.preferences, ("preference_data",)
    if isinstance(stage, (ExportStage, SelectStage)):
        for index, evaluation in enumerate(stage.evaluations):
            yield (*at, "evaluations", index), evaluation, ("evaluate",)
    if isinstance(stage, (EvaluateStage, ProbeStage)):
        for index, held_out in enumerate(stage.sources):
            yield (*at, "sources", index), held_out, ("corpus",)
    if isinstance(stage, EvaluateStage):
        if stage.memorisation:
            yield (*at, "memorisation", "probes"), stage.memorisation.probes, ("corpus",)
        if stage.generation:
            yield (*at, "generation", "prompts"), stage.generation.prompts, ("conversations",)
        if stage.against:
            yield (*at, "against"), stage.against, ("evaluate",)


def check(pipeline: Pipeline, names: set[str]) -> list[Problem]:
    """Problems that concern more than one field. `names` are all stages of the file; those that are wrong in themselves are not
    in `pipeline`."""
    problems: list[Problem] = []
    for name, stage in pipeline.stages.items():
        problems += _check_references(pipeline, name, stage, names)
        if isinstance(stage, TrainingStage):
            problems += _check_batches(pipeline, name, stage)
    problems += misnamed(pipeline.figures, names)
    trajectories: dict[str, Trajectory] = {}
    try:
        trajectories = resolve(pipeline, order(pipeline))
    except SpecError as error:
        problems += error.problems
    for name, stage in pipeline.stages.items():
        problems += _check_layout(pipeline, name, stage, trajectories)
    return problems


def _check_references(pipeline: Pipeline, name: str, stage: Stage, names: set[str]) -> Iterator[Problem]:
    if isinstance(stage, (TokenizerStage, CorpusStage, ConversationsStage)):
        for index, source in enumerate(stage.sources):
            where = ("stages", name, "sources", index if isinstance(stage, TokenizerStage) else source)
            if source not in pipeline.sources:
                yield Problem(where, f"there is no source '{source}' under sources:", nearest(source, pipeline.sources))
            elif (found := pipeline.sources[source]) is not None:
                talks = found.format in CONVERSATIONAL
                if talks != isinstance(stage, ConversationsStage):
                    wanted = ", ".join(CONVERSATIONAL) if not talks else "text"
                    yield Problem(where, f"source '{source}' has format {found.format}; a {stage.kind} needs {wanted}")
                elif isinstance(stage, CorpusStage) and found.declared is not None and found.declared.tokens is None:
                    message = f"source '{source}' declares no tokens, which the plan of a corpus counts with"
                    yield Problem(("sources", source, "declared"), message, "state declared.tokens.")
                elif found.format in TOKENISED and isinstance(stage, TokenizerStage):
                    yield Problem(where, f"source '{source}' is tokens already; a tokenizer is trained on text", "name another source.")
                elif found.format in TOKENISED and isinstance(stage, CorpusStage) and (fields := needs_text(stage.sources[source])):
                    text = f"source '{source}' is tokens already; there is no text for {', '.join(fields)}"
                    fix = "state pii: false, and no other step; what they ask for must have been done before."
                    yield Problem((*where, fields[0]), text, fix)
    for index, other in enumerate(stage.after):
        if other not in names:
            yield Problem(("stages", name, "after", index), f"there is no stage '{other}'", nearest(other, names))
    excluded = stage.exclude if isinstance(stage, MixtureStage) else []
    told = [(("stages", name, "exclude", index), Reference.parse(ref), TRAINING) for index, ref in enumerate(excluded)]
    for path, ref, kinds in [*uses(name, stage), *told]:
        target = pipeline.stages.get(ref.stage)
        if target is None:
            if ref.stage in names:
                continue
            if pipeline._document is not None and (variants := pipeline._document.variants.get(ref.stage)):
                yield Problem(path, f"stage '{ref.stage}' is a matrix of {', '.join(variants)}; name one of them")
                continue
            yield Problem(
                path, f"there is no stage '{ref.stage}'", nearest(ref.stage, [n for n, s in pipeline.stages.items() if s.kind in kinds])
            )
            continue
        if target.kind not in kinds:
            wanted = f"one of {', '.join(kinds)}" if len(kinds) > 1 else kinds[0]
            yield Problem(path, f"stage '{ref.stage}' is {a(target.kind)}; {wanted} is needed here")
            continue
        if ref.selector and kinds != CHECKPOINTS:
            yield Problem(path, f"'{ref}' names a step, and '{ref.stage}' is {a(target.kind)}, which has none", f"write '{ref.target}'.")
            continue
        if ref.best is not None and isinstance(target, MergeStage):
            yield Problem(
                path, f"'{ref}' chooses by held-out loss, and '{ref.stage}' is a merge, which has one result", f"write '{ref.stage}'."
            )
            continue
        if isinstance(target, MixtureStage) and isinstance(stage, MixtureStage) and target.anneal is not None:
            yield Problem(
                path, f"mixture '{ref.stage}' is annealed: its shares change as it is trained on", "name a mixture that is constant."
            )
            continue
        if isinstance(target, (CorpusStage, ConversationsStage)):
            if ref.part is None and len(target.sources) > 1:
                choice = ", ".join(f"{ref.stage}/{source}" for source in target.sources)
                yield Problem(path, f"{target.kind} '{ref.stage}' has several parts", f"name one: {choice}.")
            elif ref.part is not None and ref.part not in target.sources:
                yield Problem(path, f"{target.kind} '{ref.stage}' has no part '{ref.part}'", nearest(ref.part, target.sources))
            elif (
                path[-1] == "probes"
                and isinstance(target, CorpusStage)
                and target.sources[ref.part or next(iter(target.sources))].repeats is None
            ):
                yield Problem(path, f"'{ref}' has no repeats:, so there are no probes in it", "give that source of the corpus a repeats:.")
            continue
        chooses = isinstance(stage, SelectStage) and ref in stage.checkpoints
        if (ref.best is not None or chooses) and any(not leg.settings.validation.interval for leg in legs(pipeline, ref.stage)):
            yield Problem(path, f"'{ref}' chooses by held-out loss, and '{ref.stage}' measures none", "give it a validation.interval.")
        if ref.part is not None:
            parts = [leg.name for leg in legs(pipeline, ref.stage) if leg.name != ref.stage]
            if f"{ref.stage}/{ref.part}" not in parts:
                fix = f"name one: {', '.join(parts)}." if parts else f"name '{ref.stage}'."
                yield Problem(path, f"'{ref.stage}' has no part '{ref.part}'", fix)


def order(pipeline: Pipeline) -> list[str]:
    """Stage names, inputs first; the order of the file where it is free, but for mixtures, which stand where they are needed first, in the
    order in which they are drawn from. SpecError for a cycle, naming it."""
    done: list[str] = []
    path: list[str] = []
    stages = pipeline.stages

    def visit(name: str) -> None:
        if name in done:
            return
        if name in path:
            cycle = " -> ".join([*path[path.index(name) :], name])
            raise SpecError([Problem(("stages", name), f"the stages form a cycle: {cycle}", "let one of them start from another stage.")])
        path.append(name)
        behind = [other for mixture in mixtures_of(pipeline, name) for other in excluded_by(pipeline, mixture) if other != name]
        for needed in [*needs(name, stages[name]), *behind]:
            if needed in stages:
                visit(needed)
        path.pop()
        done.append(name)

    for name in sorted(stages, key=lambda name: stages[name].kind == "mixture"):
        visit(name)
    return done


def needs(name: str, stage: Stage) -> list[str]:
    """Names of the stages that must be finished before this one."""
    return list(dict.fromkeys([ref.stage for _, ref, _ in uses(name, stage)] + stage.after))


def mixtures_of(pipeline: Pipeline, name: str) -> list[str]:
    """Names of the mixtures that a stage of training draws from."""
    stage = pipeline.stages[name]
    return [ref.stage for _, ref, kinds in uses(name, stage) if kinds == ("mixture",)] if isinstance(stage, TrainingStage) else []


def excluded_by(pipeline: Pipeline, mixture: str) -> list[str]:
    """Names of the stages of training that a mixture, or one that it is made of, excludes."""
    found: dict[str, None] = {}
    seen: set[str] = set()

    def visit(name: str) -> None:
        stage = pipeline.stages.get(name)
        if name not in seen and isinstance(stage, MixtureStage):
            seen.add(name)
            found.update(dict.fromkeys(stage.exclude))
            for source in [*stage.sources, *(stage.anneal.to if stage.anneal else {})]:
                visit(Reference.parse(source).stage)

    visit(mixture)
    return list(found)


def _check_batches(pipeline: Pipeline, name: str, stage: TrainingStage) -> Iterator[Problem]:
    launch = pipeline.launch_of(stage)
    if launch.mismatch is not None:  # reported by `_check_layout`
        return
    ranks = launch.data_parallel
    pieces = [(leg.path, begin, batch) for leg in stage.legs(name) for begin, batch in (leg.settings.global_batch_size or {}).items()]
    for at, begin, batch in pieces:
        path: FieldPath = (*at, "global_batch_size", begin)
        if batch < 1 or batch % ranks:
            fix = f"use a multiple of {ranks}, or other launch.processes."
            yield Problem(path, f"a batch of {batch} sequences cannot be divided among {ranks} data-parallel processes", fix)


def _check_layout(pipeline: Pipeline, name: str, stage: Stage, trajectories: Mapping[str, Trajectory]) -> Iterator[Problem]:
    """Whether a stage that runs on the training engine can run in its layout."""
    if not isinstance(stage, (TrainingStage, EvaluateStage, ProbeStage, PreferenceDataStage)):
        return
    launch = pipeline.launch_of(stage)
    parallel = launch.parallel or Parallel()
    at: FieldPath = (*(() if stage.launch.parallel is None else ("stages", name)), "launch", "parallel")
    if launch.mismatch is not None:
        yield Problem(at, f"'{name}': {launch.mismatch}", "change launch.processes or a degree.")
        return
    if parallel.pp > 1 and (obstacle := _needs_logits(stage)):
        message = f"'{name}' cannot run in a pipeline (pp {parallel.pp}): {obstacle}"
        yield Problem((*at, "pp"), message, f"give '{name}' a launch.parallel of its own, with dp_shard, dp_replicate or cp.")
    found: list[Misfit] = []
    if isinstance(stage, TrainingStage):
        for leg in stage.legs(name) if parallel.tp > 1 else ():
            if leg.settings.compile and leg.settings.activation_checkpointing != "none":
                message = f"torch 2.13 cannot compile layers with activation checkpointing under tensor parallelism (tp {parallel.tp})"
                yield Problem((*leg.path, "compile"), message, "leave out compile, or state activation_checkpointing: none.")
        for leg in stage.legs(name):
            optimizer = trajectories[leg.name].optimizer.name if leg.name in trajectories else None
            if optimizer and (reason := refused_layout(optimizer, parallel, launch.world_size)):
                yield Problem((*leg.path, "optimizer", "name"), reason)
            objective = stage.kind if isinstance(stage, PreferenceTraining) else "cross-entropy"
            if optimizer and (reason := refused_objective(optimizer, objective)):
                yield Problem((*leg.path, "optimizer", "name"), reason)
        for trajectory in (trajectories[leg.name] for leg in stage.legs(name) if leg.name in trajectories):
            for cut in trajectory.cuts:
                found += misfits(launch, trajectory.model, trajectory.sequence_length, cut.batch)
    elif (parent := trajectories.get(leg_of(stage.from_, trajectories))) is not None:
        found += misfits(launch, parent.model)
    for misfit in dict.fromkeys(found):
        yield Problem((*at, misfit.field), f"'{name}': {misfit.message}", misfit.fix)


def _needs_logits(stage: Stage) -> str:
    """Why the layers of a stage's model cannot lie on different processes; "" where they can."""
    if isinstance(stage, PreferenceTraining):
        return "its loss needs the whole sequences of a batch at once"
    if isinstance(stage, SftStage) and stage.prompt_weight:
        return f"the weights of its tokens (prompt_weight {stage.prompt_weight:g}) do not reach the last process"
    return "" if isinstance(stage, TrainingStage) else "it needs the logits on every process"
