"""What a stage names: checkpoints, data, other results; and the order of the stages that follows from it."""

from __future__ import annotations

from collections.abc import Iterator

from specs.errors import FieldPath, Problem, SpecError
from specs.pipeline import CHECKPOINTS, Pipeline
from specs.stages.base import FromCheckpoint, Stage
from specs.stages.conversations import ConversationsStage
from specs.stages.corpus import CorpusStage
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
from specs.units import Reference


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
