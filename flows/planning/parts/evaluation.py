"""Parts of the kinds that measure, choose or export models: `evaluate`, `probe`, `select`, `export`."""

from itertools import chain
from typing import Any, cast

from apertus_model.evaluation.harness.metrics import is_known
from flows.planning.graph import Input, Node
from flows.planning.parts.builder import Builder, numbered, reads, shared
from flows.planning.parts.harness import add_harness, suite_of
from flows.planning.parts.preferences import (
    add_completions,
    add_model,
    add_prompts,
    add_rewards,
    check_asked,
    check_room,
    exported,
)
from infra.store.hugging_face import HubModel
from specs.errors import FieldPath, did_you_mean
from specs.planted import Canaries
from specs.stages.corpus import CorpusSource, CorpusStage
from specs.stages.evaluate import CONTINUATIONS, SUITE, EvaluatePart, EvaluateStage
from specs.stages.export import ExportStage
from specs.stages.memorisation import ContinuationsPart, Memorisation
from specs.stages.preference_data import PromptsPart
from specs.stages.probe import ProbePart, ProbeStage
from specs.stages.select import SelectPart, SelectStage
from specs.trajectory import Trajectory, candidates
from specs.units import Reference

EXTRAPOLATION = 16
"""The largest ratio of the length of held-out sequences to the model's context: the context of Apertus grows
from 4,096 to 65,536 tokens, and the earlier model is measured at the length of the later one."""


def add_evaluate(builder: Builder, name: str, stage: EvaluateStage) -> None:
    """Adds the parts that generate answers or run tasks, and the evaluation as the last part."""
    at: FieldPath = ("stages", name)
    if (other := builder.other_model(stage.from_)) is not None:
        _add_other(builder, name, stage, other)
        return
    checkpoint, trajectory = builder.checkpoint(stage.from_, (*at, "from"))
    tokenizer = builder.tokenizer_of(checkpoint)
    sources = _held_out(builder, at, stage.sources, tokenizer)
    inputs = {"checkpoint": checkpoint, "tokenizer": tokenizer, **sources}
    memorisation = stage.memorisation
    if memorisation:
        _check_probes(builder, memorisation, (*at, "memorisation"))
        model = add_model(builder, name, checkpoint, trajectory)
        inputs |= _continuations(builder, name, memorisation, model)
    if by := stage.by_position:
        _check_length(builder, by.sequence_length, trajectory, (*at, "by_position", "sequence_length"))
    _check_length(builder, stage.sequence_length, trajectory, (*at, "sequence_length"))
    if stage.generation:
        model = add_model(builder, name, checkpoint, trajectory)
        inputs |= _generation(builder, name, stage, model, checkpoint, trajectory.context_length)
    if stage.harness:
        model = add_model(builder, name, checkpoint, trajectory)
        inputs |= add_harness(builder, name, stage, reads(model), trajectory.chat)
    against_trajectory = _compare(builder, name, stage, inputs) if stage.against else None
    own = {
        "model": trajectory.model,
        "sequence_length": _length(builder, stage, trajectory),
        "canaries": _exposed(builder, memorisation),
        "against_model": against_trajectory.model if against_trajectory else None,
        "source_names": [source.name for source in sources.values()],
        "name": checkpoint.name,
    }
    _add_evaluation(builder, name, stage, inputs, own)


def _add_other(builder: Builder, name: str, stage: EvaluateStage, model: HubModel) -> None:
    """Adds the evaluation of a model of another architecture, which the training engine does not load."""
    at: FieldPath = ("stages", name)
    folder = builder.kept_folder(stage.from_, name, (*at, "from"))
    inputs: dict[str, Input] = {}
    if stage.generation:
        check_asked(builder, (*at, "generation"), stage.from_)
        inputs |= _generation(builder, name, stage, folder, None, model.context)
    if stage.harness:
        inputs |= add_harness(builder, name, stage, reads(folder), model.chat)
    if stage.against:
        _compare(builder, name, stage, inputs)
    own = {"model": None, "sequence_length": model.context, "name": str(stage.from_)}
    _add_evaluation(builder, name, stage, inputs, own | {"source_names": []})


def _add_evaluation(
    builder: Builder, name: str, stage: EvaluateStage, inputs: dict[str, Input], own: dict[str, Any]
) -> None:
    """Adds the evaluation itself, with `own` fields beside those of the stage."""
    against = inputs.get("against_checkpoint") or inputs.get("against")
    own["against_name"] = against.name if against else ""
    if stage.generation is not None:
        own |= {"shown": stage.generation.shown, "answers": stage.generation.sampling.distinct}
    node = builder.node(name, name, EvaluatePart(**shared(stage, EvaluatePart) | own), inputs)
    for path, metric in builder.stated_metrics(name):
        _check_metric(builder, node, metric, path)


def _held_out(builder: Builder, at: FieldPath, named: list[Reference], tokenizer: Input) -> dict[str, Input]:
    """The sources whose held-out text is scored, which must have the tokenizer of the model."""
    sources = [builder.part(source) for source in named]
    for index, source in enumerate(sources):
        builder.same_tokenizer((*at, "sources", index), source, tokenizer)
    return numbered("source", sources)


def _check_metric(builder: Builder, evaluation: Node, metric: str, path: FieldPath) -> None:
    stage = cast(EvaluateStage, builder.pipeline.stages[evaluation.stage])
    suites = {
        role.removeprefix(SUITE): builder.suite_metrics.get(input_.name)
        for role, input_ in evaluation.inputs.items()
        if role.startswith(SUITE)
    }
    if (suite := suite_of(stage, metric)) is not None and suites[suite] is None:
        return  # the harness is not installed
    known = [*_metrics(builder, stage, evaluation), *chain.from_iterable(filter(None, suites.values()))]
    if not is_known(metric, known):
        builder.unknown_metric(path, evaluation.name, metric, known)


def _metrics(builder: Builder, stage: EvaluateStage, evaluation: Node) -> list[str]:
    """The metrics of an evaluation, without those of the harness."""
    part = cast(EvaluatePart, evaluation.part)
    buckets = _buckets(builder, stage.memorisation) if stage.memorisation else []
    against = _evaluated(builder, stage.against).source_names if stage.against else []
    return part.metrics(evaluation.inputs, buckets, against)


def _evaluated(builder: Builder, against: Reference) -> EvaluatePart:
    return cast(EvaluatePart, builder.graph.nodes[against.stage].part)


def _probed(builder: Builder, memorisation: Memorisation) -> CorpusSource:
    """The source of the corpus whose probes are continued."""
    probes = memorisation.probes
    sources = cast(CorpusStage, builder.pipeline.stages[probes.stage]).sources
    return sources[probes.part or next(iter(sources))]


def _buckets(builder: Builder, memorisation: Memorisation) -> list[int]:
    """Numbers of repetitions of the probes."""
    process = _probed(builder, memorisation)
    if memorisation.planted is not None:
        return process.planted[memorisation.planted].buckets
    assert process.repeats is not None, "checked with the references"
    return process.repeats.buckets


def _exposed(builder: Builder, memorisation: Memorisation | None) -> Canaries | None:
    if memorisation is None or memorisation.exposure is None:
        return None
    assert memorisation.planted is not None, "checked with the references"
    return _probed(builder, memorisation).planted[memorisation.planted].canaries


def _check_probes(builder: Builder, memorisation: Memorisation, path: FieldPath) -> None:
    """Adds a problem for probes shorter than offset, prefix and suffix together, which measure nothing.
    Lengths of planted documents are unknown until they are tokenised."""
    repeats = _probed(builder, memorisation).repeats
    if memorisation.planted is not None or repeats is None:
        return
    offset, prefix, suffix = max(memorisation.offsets), max(memorisation.prefixes), memorisation.suffix
    total, length = offset + prefix + suffix, repeats.length
    if total > length:
        needed = f"offset {offset}, prefix {prefix} and suffix {suffix} are {total} tokens"
        message = f"{needed}, but the probes of '{memorisation.probes}' have {length}"
        fix = f"set a sum of {length} at most, or a larger repeats.length of the corpus."
        builder.problem(path, message, fix)


def _check_length(builder: Builder, length: int | None, trajectory: Trajectory, path: FieldPath) -> None:
    """Adds a problem for sequences far beyond the model's context, which measure nothing and need memory that
    grows with the square of their length."""
    context, limit = trajectory.context_length, EXTRAPOLATION * trajectory.context_length
    if length is not None and length > limit:
        trained = f"the model was trained on {context:,} at most"
        message = f"sequences of {length:,} tokens, and {trained}; the limit is {EXTRAPOLATION} times that"
        builder.problem(path, message, f"set {limit} or less.")


def _length(builder: Builder, stage: EvaluateStage, trajectory: Trajectory) -> int:
    """The length of the held-out sequences: the stage's, else that of the evaluation in `against`, else the
    model's."""
    if stage.sequence_length is not None or stage.against is None:
        return stage.sequence_length or trajectory.settings.sequence_length
    return _evaluated(builder, stage.against).sequence_length


def _continuations(builder: Builder, name: str, memorisation: Memorisation, model: Node) -> dict[str, Input]:
    """The inputs for memorisation: the probes, and their continuations by `model`, one part for each way of
    decoding."""
    probes = builder.part(memorisation.probes)
    inputs = {"probes": probes}
    for decoding, sampling in memorisation.decodings.items():
        builder.sampled(("stages", name, "memorisation"), model, sampling.engine)
        part = ContinuationsPart(**shared(memorisation, ContinuationsPart), sampling=sampling)
        own = {"model": reads(model), "probes": probes}
        node = builder.node(f"{name}/{decoding}", name, part, own, kind="continuations")
        inputs[f"{CONTINUATIONS}{decoding}"] = reads(node)
    return inputs


def _generation(
    builder: Builder, name: str, stage: EvaluateStage, model: Node, checkpoint: Input | None, context: int
) -> dict[str, Input]:
    """The inputs for generation: prompts, answers of `model` and their rewards. Without a `checkpoint`, the
    model has another tokenizer."""
    generation = stage.generation
    assert generation is not None
    at: FieldPath = ("stages", name, "generation")
    if generation.sampling.by_chat:
        message = f"with api: chat a server may have any model; this stage measures {stage.from_}"
        builder.problem((*at, "sampling", "server", "api"), message, "set api: completions.")
    room = (*at, "sampling", "max_new_tokens")
    check_room(builder, room, generation.sampling, context, "context length")
    if checkpoint is None:
        context = _max_tokens(builder, stage, context)
    part = PromptsPart(
        split="validation",
        limit=generation.limit,
        offline=True,
        max_tokens=context,
        max_new_tokens=generation.sampling.max_new_tokens,
        sampled=generation.sampling.n,
        min_branches=1,
    )
    prompts = add_prompts(builder, name, [generation.prompts], (*at, "prompts"), checkpoint, part, room)
    completions = add_completions(builder, name, generation.sampling, model, prompts)
    inputs = {"prompts": reads(prompts), "completions": reads(completions)}
    if generation.reward:
        rewards = add_rewards(builder, name, generation.reward, (*at, "reward"), prompts, completions)
        inputs["rewards"] = reads(rewards)
    return inputs


def _max_tokens(builder: Builder, stage: EvaluateStage, context: int) -> int:
    """The most tokens of a prompt and its answer, in the tokenizer of the conversations: as many as in the
    evaluation in `against`, so that both answer the same prompts."""
    if stage.against is None:
        return context
    prompts = builder.graph.nodes[stage.against.stage].inputs.get("prompts")
    return cast(PromptsPart, builder.graph.nodes[prompts.node or ""].part).max_tokens if prompts else context


def _compare(
    builder: Builder, name: str, stage: EvaluateStage, inputs: dict[str, Input]
) -> Trajectory | None:
    """Adds the results that the stage is compared with to `inputs`, and returns the trajectory of the other
    model. Answers can be compared if prompts and sampling are the same. None if one of the two models is of
    another architecture, which has no divergence."""
    assert stage.against is not None
    path: FieldPath = ("stages", name, "against")
    other = builder.graph.nodes[stage.against.stage]
    other_stage = cast(EvaluateStage, builder.pipeline.stages[stage.against.stage])
    trajectory = None
    inputs["against"] = reads(other)
    if "checkpoint" in inputs and builder.other_model(other_stage.from_) is None:
        against, trajectory = builder.checkpoint(other_stage.from_, ("stages", stage.against.stage, "from"))
        builder.same_tokenizer(path, against, inputs["tokenizer"])
        inputs["against_checkpoint"] = against
    theirs = cast(EvaluatePart, other.part)
    if stage.sources and theirs.source_names:
        for field, own_value, value in (
            ("samples", stage.samples, theirs.samples),
            ("sequence_length", stage.sequence_length or theirs.sequence_length, theirs.sequence_length),
        ):
            if own_value != value:
                differ = f"'{stage.against}' has {field} {value}, this stage {own_value}"
                message = f"{differ}; forgetting needs the same held-out text"
                builder.problem(("stages", name, field), message, f"set {field}: {value}.")
    if "completions" in inputs and "completions" in other.inputs:
        answers = (inputs["completions"], other.inputs["completions"])
        sampled = [builder.graph.nodes[answer.node or ""].part.identity_fields() for answer in answers]
        alike = inputs["prompts"].fingerprint == other.inputs["prompts"].fingerprint
        if not alike or sampled[0] != sampled[1]:
            message = f"'{stage.against}' and this stage differ in prompts or sampling"
            builder.problem(path, message, "set the same generation: in both.")
        if "rewards" in inputs and "rewards" in other.inputs:
            inputs["against_rewards"] = other.inputs["rewards"]
            inputs["against_completions"] = other.inputs["completions"]
    return trajectory


def add_probe(builder: Builder, name: str, stage: ProbeStage) -> None:
    at: FieldPath = ("stages", name)
    checkpoint, trajectory = builder.checkpoint(stage.from_, (*at, "from"))
    _check_length(builder, stage.sequence_length, trajectory, (*at, "sequence_length"))
    tokenizer = builder.tokenizer_of(checkpoint)
    inputs = {"checkpoint": checkpoint, "tokenizer": tokenizer}
    inputs |= _held_out(builder, at, stage.sources, tokenizer)
    length = stage.sequence_length or trajectory.settings.sequence_length
    own = {"model": trajectory.model, "sequence_length": length}
    builder.node(name, name, ProbePart(**shared(stage, ProbePart) | own), inputs)


def add_select(builder: Builder, name: str, stage: SelectStage) -> None:
    """Adds one part, which reads the metrics; stages that start from it read the chosen checkpoint itself."""
    among = [builder.checkpoint(ref, path) for path, ref in candidates(builder.pipeline, name)]
    checkpoints = [checkpoint for checkpoint, _ in among]
    different = {(checkpoint.hashed, repr(trajectory.model)) for checkpoint, trajectory in among}
    if len(different) < len(checkpoints):
        builder.problem(("stages", name), "two of the candidates are the same checkpoint", "name each once.")
    names = [str(ref) for _, ref in candidates(builder.pipeline, name)]
    evaluations = [builder.part(evaluation) for evaluation in stage.evaluations]
    if stage.checkpoints:
        _check_losses(builder, name, stage, checkpoints)
    for evaluation in evaluations:
        _check_metric(builder, builder.graph.nodes[evaluation.name], stage.metric, ("stages", name, "metric"))
    inputs = numbered("checkpoint", checkpoints) | numbered("evaluation", evaluations)
    builder.node(name, name, SelectPart(**shared(stage, SelectPart), names=names), inputs)


def _check_losses(builder: Builder, name: str, stage: SelectStage, checkpoints: list[Input]) -> None:
    """Checks that the held-out loss by which checkpoints are compared is measured at the step of each."""
    wanted = stage.metric.removeprefix("val_loss").removeprefix("/")
    for index, (ref, checkpoint) in enumerate(zip(stage.checkpoints, checkpoints, strict=True)):
        node = builder.graph.nodes[checkpoint.name]
        path: FieldPath = ("stages", name, "checkpoints", index)
        if node.kind == "select":
            continue  # a selection that has not chosen yet
        if (segment := node.segment) is None:
            message = f"'{ref}' was not trained, so it has no held-out loss"
            builder.problem(path, message, "name evaluations in place of checkpoints.")
            continue
        interval, step = segment.validation.interval, checkpoint.step or 0
        if wanted and wanted not in segment.source_names:
            message = f"'{stage.metric}' is the held-out loss of '{wanted}', which '{ref}' does not train on"
            builder.problem(("stages", name, "metric"), message, did_you_mean(wanted, segment.source_names))
        elif interval and step % interval and step != node.end_step and ref.best is None:
            measured = f"held-out loss is measured every {interval} steps and at step {node.end_step}"
            message = f"'{ref}' is step {step}, but {measured}"
            builder.problem(path, message, "name such a step, or set another validation.interval.")


def add_export(builder: Builder, name: str, stage: ExportStage) -> None:
    path: FieldPath = ("stages", name, "from")
    checkpoint, trajectory = builder.checkpoint(stage.from_, path)
    builder.exportable(path, trajectory)
    inputs = {"checkpoint": checkpoint, "tokenizer": builder.tokenizer_of(checkpoint)}
    inputs |= numbered("evaluation", map(builder.part, stage.evaluations))
    builder.node(name, name, exported(stage, trajectory), inputs)
