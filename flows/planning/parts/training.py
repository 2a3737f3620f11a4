"""Parts of the kinds that make checkpoints: a node per segment of every phase, and merges."""

from typing import cast

from flows.planning.estimate.flops import training as flops_per_token
from flows.planning.graph import Graph, Input
from flows.planning.parts.builder import Builder, numbered, reads, shared
from flows.planning.parts.consumed_samples import Drawn, counter, excluded
from flows.planning.parts.distill import add_teacher
from flows.planning.parts.domain_weights import domain_fields
from flows.planning.parts.training_data import DATA, packed
from infra.store import Checkpoint, Store
from specs.dependencies import uses
from specs.errors import FieldPath, SpecError, did_you_mean
from specs.launch import Checkpointing
from specs.pipeline import Pipeline
from specs.settings import Phase
from specs.stages.merge import MergePart, MergeStage
from specs.stages.rewrite import RewritePart, RewriteStage
from specs.stages.select import SelectPart
from specs.stages.tokenizer import TokenizerPart
from specs.stages.training import TrainingStage
from specs.trajectory import Trajectory, point_of
from specs.units import Reference

OF_KIND = {"distill": add_teacher, "domain_weights": domain_fields}
"""Further inputs and fields of the segments of a kind."""


def add_training(builder: Builder, name: str, stage: TrainingStage) -> None:
    """Adds a chain of segments per phase."""
    for phase in stage.phases(name):
        if phase.name in builder.graph.trajectories:
            _add_phase(builder, stage, phase)


def _add_phase(builder: Builder, stage: TrainingStage, phase: Phase) -> None:
    graph = builder.graph
    trajectory = graph.trajectories[phase.name]
    start, drawn = None, Drawn()
    if phase.parent is not None and trajectory.parent is not None:
        start, _ = builder.checkpoint(phase.parent, (*phase.path, "from"))
        step = start.step or trajectory.parent.step
        drawn = Drawn.before(graph, graph.nodes[start.name], step, carried="data" in trajectory.carry)
    for index in range(len(trajectory.segments)):
        _add_segment(builder, stage, phase, index, start, drawn)
    _check_best(builder, phase)
    if trajectory.leftover_tokens:
        graph.notes.append(
            f"{phase.name}: {phase.training.budget} are {trajectory.steps} whole steps;"
            f" {trajectory.leftover_tokens:,} tokens are left over"
        )


def _add_segment(
    builder: Builder, stage: TrainingStage, phase: Phase, index: int, start: Input | None, drawn: Drawn
) -> None:
    """Adds a segment of a phase, which starts from the checkpoint `start`."""
    graph, trajectory = builder.graph, builder.graph.trajectories[phase.name]
    planned, length = trajectory.segments[index], trajectory.settings.sequence_length
    parent = start if index == 0 else reads(*drawn.ancestry[0])
    data = DATA[stage.trains_on](builder, stage, phase, planned, start)
    fields = stage.segment_fields(trajectory.settings) | data.fields
    inputs = data.inputs | {role: builder.part(getattr(stage, field)) for role, field in stage.INPUTS.items()}
    key = counter(data.inputs, length, fields["packing"])
    if (mixture := inputs.get("mixture")) is not None:
        before = excluded(builder, phase.path, mixture, length, fields["packing"], drawn)
        if mixture.fingerprint in before:
            own = before.pop(mixture.fingerprint).samples
            drawn.samples[key] = max(drawn.samples.get(key, 0), own)
        others = [before[fingerprint] for fingerprint in sorted(before)]
        fields["excluded"] = [other.samples for other in others]
        inputs |= numbered("excluded", (other.mixture for other in others))
        inputs |= packed(builder, phase, mixture, trajectory)
    inputs["tokenizer"] = _tokenizer(builder, phase, data.inputs, trajectory)
    fields |= {
        "model": trajectory.model,
        "seed": trajectory.seed if index == 0 else None,
        "global_batch_size": planned.batch,
        "sample_offset": drawn.samples.get(key, 0),
        "start_step": planned.start_step,
        "start_tokens": planned.start_sample * length,
        "carry": list(trajectory.carry) if index == 0 and parent is not None else [],
        "schedule": planned.schedule,
        "end_step": planned.end_step,
        "checkpoint": _kept(builder, phase.name, phase.training.checkpoint),
        "parallel": builder.pipeline.launch_of(stage).degrees,
    }
    name = phase.name
    if len(trajectory.segments) > 1:
        name += f"{'.' if phase.name != phase.stage else '/'}{index + 1}"
    if (of_kind := OF_KIND.get(stage.kind)) is not None:
        own_inputs, own_fields = of_kind(builder, stage, phase, planned, name, inputs, fields)
        inputs, fields = inputs | own_inputs, fields | own_fields
    segment = stage.SEGMENT(**fields)
    tokens = planned.steps * segment.tokens_per_step
    node = builder.node(
        name,
        phase.stage,
        segment,
        inputs | ({"parent": parent} if parent else {}),
        start_step=planned.start_step,
        end_step=planned.end_step,
        tokens=tokens,
        flops=tokens * flops_per_token(segment),
        phase=phase.name,
    )
    if parent is not None:
        models = parent if graph.nodes[parent.name].imported else builder.tokenizer_of(parent)
        builder.same_tokenizer((*phase.path, data.field), next(iter(data.inputs.values())), models)
    drawn.add(node, key, planned)


def _kept(builder: Builder, phase: str, checkpoint: Checkpointing) -> Checkpointing:
    """The checkpoint settings of a phase, with `milestones` extended by the steps that other stages start
    from, and `best` by the metrics by which they choose."""
    wanted, best = set(checkpoint.milestones), set(checkpoint.best)
    for start, ref in builder.starts:
        if start.phase == phase:
            wanted.add(start.step)
            best |= {ref.best} if ref.best else set()
    return checkpoint.model_copy(update={"milestones": sorted(wanted), "best": sorted(best)})


def _check_best(builder: Builder, phase: Phase) -> None:
    """Checks that the metrics of `checkpoint.best` are measured: otherwise none would be kept for them."""
    segments = builder.graph.segments(phase.name)
    sources = sorted({name for node in segments for name in getattr(node.part, "source_names", [])})
    for index, metric in enumerate(phase.training.checkpoint.best):
        path: FieldPath = (*phase.path, "checkpoint", "best", index)
        wanted = metric.removeprefix("val_loss").removeprefix("/")
        if not phase.training.validation.interval:
            message = f"'{metric}' is a held-out loss, but '{phase.name}' measures none"
            builder.problem(path, message, "give it a validation.interval.")
        elif wanted and wanted not in sources:
            message = f"'{metric}' is the held-out loss of '{wanted}', which '{phase.name}' does not train on"
            builder.problem(path, message, did_you_mean(wanted, sources))


def _tokenizer(builder: Builder, phase: Phase, data: dict[str, Input], trajectory: Trajectory) -> Input:
    tokenizer = builder.tokenizer_of(next(iter(data.values())))
    part = cast(TokenizerPart, builder.graph.nodes[tokenizer.name].part)
    start = trajectory.parent
    known = start is not None and builder.graph.trajectories[start.phase].origin != "import"
    if not known and part.vocab_size > trajectory.model.vocab_size:  # otherwise the parent has the problem
        embeddings = f"the model has {trajectory.model.vocab_size:,} embeddings"
        message = f"{embeddings}, tokenizer '{tokenizer.name}' has {part.vocab_size:,} ids"
        path: FieldPath = (*phase.path, *(("model", "vocab_size") if start is None else ("from",)))
        builder.problem(path, message, f"set the model's vocab_size to {part.vocab_size}.")
    return tokenizer


def add_merge(builder: Builder, name: str, stage: MergeStage) -> None:
    """Adds one part, whose result is its checkpoint 1."""
    if name not in builder.graph.trajectories:
        return
    weights = stage.weights or [1.0] * len(stage.checkpoints)
    pairs = zip(stage.checkpoints, weights, strict=True)
    merged = [
        (builder.checkpoint(ref, ("stages", name, "checkpoints", index))[0], weight)
        for index, (ref, weight) in enumerate(pairs)
    ]
    if len({checkpoint.hashed for checkpoint, _ in merged}) < len(merged):
        path = ("stages", name, "checkpoints")
        builder.problem(path, "two of these are the same checkpoint", "add their weights.")
    merged.sort(key=lambda pair: pair[0].hashed)
    trajectory = builder.graph.trajectories[name]
    tokenizer = builder.tokenizer_of(merged[0][0])
    inputs = numbered("checkpoint", (checkpoint for checkpoint, _ in merged))
    if stage.base is not None:
        inputs["base"] = builder.checkpoint(stage.base, ("stages", name, "base"))[0]
        if inputs["base"].hashed in {checkpoint.hashed for checkpoint, _ in merged}:
            message = f"'{stage.base}' is both base and one of checkpoints, so they do not differ"
            builder.problem(("stages", name, "base"), message, "name what the others were trained from.")
    for role, checkpoint in inputs.items():
        path = ("stages", name, role.partition(":")[0].replace("checkpoint", "checkpoints"))
        builder.same_tokenizer(path, checkpoint, tokenizer)
    own = {"model": trajectory.model, "weights": [weight for _, weight in merged]}
    inputs["tokenizer"] = tokenizer
    builder.node(name, name, MergePart(**shared(stage, MergePart) | own), inputs, end_step=1, phase=name)


def add_rewrite(builder: Builder, name: str, stage: RewriteStage) -> None:
    """Adds one part, which states how the model is computed; stages that start from it read its input."""
    if name in builder.graph.trajectories:
        checkpoint, trajectory = builder.checkpoint(Reference(name), ("stages", name, "from"))
        builder.node(name, name, RewritePart(model=trajectory.model), {"checkpoint": checkpoint})


def best_steps(graph: Graph, pipeline: Pipeline, store: Store) -> dict[str, int]:
    """The kept checkpoint with the lowest value for each `@best:` reference whose stage has finished, and the
    chosen candidate for each selection that has finished. Adds a note for each that is not known yet."""
    steps: dict[str, int] = {}
    for node in [node for node in graph.nodes.values() if node.kind == "select"]:
        if (choice := node.artifact(store)).complete:
            steps[node.name] = int(choice.metric("chosen"))
        elif any(node.name in graph.parents(other) for other in graph.nodes.values()):
            note = f"'{node.name}' is chosen when its candidates have finished; until then it is planned as"
            graph.notes.append(f"{note} {cast(SelectPart, node.part).names[0]}")
    seen: set[str] = set()
    for name, stage in pipeline.stages.items():
        for path, ref, *_ in uses(name, stage):
            if ref.best is None or str(ref) in seen:
                continue
            seen.add(str(ref))
            nodes = graph.segments(point_of(ref, graph.trajectories, path, graph.best).phase)
            sources = {name for node in nodes for name in getattr(node.part, "source_names", [])}
            wanted = ref.best.removeprefix("val_loss").removeprefix("/")
            if wanted and wanted not in sources:
                message = (
                    f"'{ref}' chooses by the held-out loss of '{wanted}', which '{ref.stage}' does not"
                    " train on"
                )
                raise SpecError.of(path, message, did_you_mean(wanted, sources))
            if not all(node.artifact(store).complete for node in nodes):
                graph.notes.append(
                    f"'{ref}' is known when '{ref.stage}' has finished; until then it is planned from the"
                    " last step"
                )
                continue
            kept = [
                node.artifact(store).checkpoint(step) for node in nodes for step in node.kept_steps(store)
            ]
            values = {c.step: value for c in kept if (value := c.validation_loss(ref.best)) is not None}
            if not values:
                raise _nothing_measured(path, ref, kept)
            steps[str(ref)] = min(values, key=lambda step: (values[step], step))
    return steps


def _nothing_measured(path: FieldPath, ref: Reference, kept: list[Checkpoint]) -> SpecError:
    """The error for an `@best:` metric that no kept checkpoint of a finished stage has."""
    steps = ", ".join(str(checkpoint.step) for checkpoint in kept) or "none"
    measured = sorted({name for checkpoint in kept for name in checkpoint.facts.get("validation") or {}})
    there = f"; they have {', '.join(f'val_loss/{name}' for name in measured)}" if measured else ""
    message = f"'{ref}': {ref.best} was measured at none of the steps that '{ref.stage}' kept, {steps}{there}"
    fix = "name one of these metrics, make validation.interval divide checkpoint.interval, or name a step."
    return SpecError.of(path, message, fix)
