"""Parts of the kinds that make checkpoints: a node per segment of every phase, and merges."""

from __future__ import annotations

from typing import Any, cast

from flows.planning.estimate.flops import training as flops_per_token
from flows.planning.graph import Graph, Input
from flows.planning.mixtures import corpora
from flows.planning.parts.builder import Builder, reads
from flows.planning.parts.consumed_samples import (
    Ancestry,
    Counters,
    ancestry_of,
    consumed_until,
    counter,
    excluded,
)
from flows.planning.parts.distill import add_teacher
from flows.planning.parts.domain_weights import domain_fields
from flows.planning.parts.preferences import (
    add_log_probabilities,
    check_preferences,
    preference_inputs,
)
from infra.store import Checkpoint, Store
from specs.dependencies import uses
from specs.errors import FieldPath, SpecError, did_you_mean
from specs.launch import Checkpointing
from specs.pipeline import Pipeline
from specs.stages.distill import DistillStage
from specs.stages.domain_weights import DomainWeightsStage
from specs.stages.dpo import DpoStage
from specs.stages.import_model import ImportModelPart
from specs.stages.merge import MergePart, MergeRule, MergeStage
from specs.stages.packing import PackingPart
from specs.stages.preference_training import PreferenceTraining
from specs.stages.reward_model import LabelledPairsPart, RewardModelStage
from specs.stages.rewrite import RewritePart
from specs.stages.select import SelectPart
from specs.stages.sft import SftLoss, SftStage
from specs.stages.tokenizer import TokenizerPart
from specs.stages.training import MixtureTraining, Phase, Segment, TrainingStage
from specs.trajectory import SegmentPlan, Trajectory, point_of
from specs.units import Reference

# input of a segment -> the field of the stage that names it
FIELDS = {"mixture": "mixture", "pairs": "preferences"}


def add_training(builder: Builder, name: str) -> None:
    """Adds a chain of segments per phase."""
    stage = cast(TrainingStage, builder.pipeline.stages[name])
    for phase in stage.phases(name):
        if phase.name in builder.graph.trajectories:
            _add_phase(builder, stage, phase)


def _add_phase(builder: Builder, stage: TrainingStage, phase: Phase) -> None:
    graph, settings = builder.graph, phase.settings
    trajectory = graph.trajectories[phase.name]
    parent: Input | None = None
    consumed: Counters = {}
    ancestry: Ancestry = []
    carried: Ancestry = []
    if phase.parent is not None and trajectory.parent is not None:
        parent, _ = builder.checkpoint(phase.parent, (*phase.path, "from"))
        before = graph.nodes[parent.name]
        step = parent.step or trajectory.parent.step
        ancestry = ancestry_of(graph, before, step)
        if "data" in trajectory.carry:
            consumed, carried = consumed_until(graph, before, step), ancestry
    parallel = builder.pipeline.launch_of(stage).degrees
    if isinstance(stage, PreferenceTraining) and parent is not None:
        check_preferences(builder, stage, phase, parent)
    for index, planned in enumerate(trajectory.segments):
        data, extra = _data(builder, stage, phase, planned)
        packing = extra.get("packing", Segment.model_fields["packing"].default)
        key = counter(data, trajectory.sequence_length, packing)
        inputs = dict(data)
        if isinstance(settings, MixtureTraining):
            mixture = data["mixture"]
            drawn = excluded(
                builder, phase.path, mixture, trajectory.sequence_length, packing, ancestry, carried
            )
            if mixture.fingerprint in drawn:
                consumed[key] = max(consumed.get(key, 0), drawn.pop(mixture.fingerprint).samples)
            extra |= {"excluded": [drawn[name].samples for name in sorted(drawn)]}
            inputs |= {f"excluded:{index}": drawn[name].mixture for index, name in enumerate(sorted(drawn))}
            inputs |= _packed(builder, phase, mixture, trajectory)
        fields: dict[str, Any] = {
            "model": trajectory.model,
            "seed": trajectory.seed if index == 0 else None,
            "sequence_length": trajectory.sequence_length,
            "global_batch_size": planned.batch,
            "sample_offset": consumed.get(key, 0),
            "start_step": planned.start_step,
            "start_tokens": planned.start_sample * trajectory.sequence_length,
            "carry": list(trajectory.carry) if index == 0 and parent is not None else [],
            "optimizer": trajectory.optimizer,
            "schedule": planned.schedule,
            "goldfish": trajectory.goldfish if isinstance(settings, MixtureTraining) else None,
            "z_loss": trajectory.z_loss if isinstance(settings, MixtureTraining) else 0.0,
            "precision": trajectory.precision,
            "trainable": trajectory.trainable,
            "anomalies": settings.anomalies,
            "deterministic": settings.deterministic,
            "end_step": planned.end_step,
            "micro_batch_size": settings.micro_batch_size,
            "attention": settings.attention,
            "activation_checkpointing": settings.activation_checkpointing,
            "memory_budget": settings.memory_budget,
            "compile": settings.compile,
            "checkpoint": _kept(builder, phase.name, settings.checkpoint),
            "validation": settings.validation,
            "norms_interval": settings.norms_interval,
            "parallel": parallel,
        }
        inputs["tokenizer"] = _tokenizer(builder, phase, data, trajectory)
        name = phase.name
        if len(trajectory.segments) > 1:
            name += f"{'.' if phase.name != phase.stage else '/'}{index + 1}"
        if isinstance(stage, DistillStage):
            teacher, taught = add_teacher(builder, stage, phase, planned, name, inputs, fields | extra)
            inputs, extra = inputs | teacher, extra | taught
        if isinstance(stage, DomainWeightsStage):
            extra |= domain_fields(builder, stage, phase, planned, data["mixture"])
        segment = stage.segment()(**fields, **extra)
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
            own = getattr(stage, "pairs", [])
            field = "pairs" if own else FIELDS.get(next(iter(data)).partition(":")[0], "conversations")
            what = next(iter(data.values())).name
            models = (
                parent
                if isinstance(graph.nodes[parent.name].part, ImportModelPart)
                else builder.tokenizer_of(parent)
            )
            builder.same_tokenizer((*phase.path, field), what, node.inputs["tokenizer"], models)
        consumed[key] = consumed.get(key, 0) + planned.end_sample - planned.start_sample
        ancestry, carried = [(node, planned.end_step), *ancestry], [(node, planned.end_step), *carried]
        parent = reads(node, planned.end_step)
    _check_best(builder, phase)
    if trajectory.leftover_tokens:
        graph.notes.append(
            f"{phase.name}: {settings.budget} are {trajectory.steps} whole steps;"
            f" {trajectory.leftover_tokens:,} tokens are left over"
        )


def _data(
    builder: Builder, stage: TrainingStage, phase: Phase, planned: SegmentPlan
) -> tuple[dict[str, Input], dict[str, Any]]:
    """The inputs of a segment, and the fields of its kind."""
    if isinstance(stage, SftStage):
        chosen = sorted(
            ((builder.part(Reference.parse(part)), repeats) for part, repeats in stage.conversations.items()),
            key=lambda pair: pair[0].fingerprint,
        )
        shortest = builder.shortest([read for read, _ in chosen], "train")
        _check_fits(builder, phase, shortest if stage.longer == "drop" else 0, "conversation")
        return {f"conversations:{index}": read for index, (read, _) in enumerate(chosen)}, {
            "repeats": [repeats for _, repeats in chosen],
            "source_names": [read.name for read, _ in chosen],
            **{name: getattr(stage, name) for name in SftLoss.model_fields},
            "packing": stage.packing,
            "longer": stage.longer,
            "data_seed": stage.data_seed,
            "lora": stage.lora,
        }
    if isinstance(stage, DpoStage) and stage.pairs:
        return _labelled_pairs(builder, stage, phase), {"loss": stage.loss, "data_seed": stage.data_seed}
    if isinstance(stage, PreferenceTraining):
        return preference_inputs(builder, stage, phase), {
            "loss": cast(Any, stage).loss,
            "source_names": list(stage.preferences),
            "data_seed": stage.data_seed,
            "repeats": list(stage.preferences.values()),
        }
    if isinstance(stage, RewardModelStage):
        length = builder.graph.trajectories[phase.name].sequence_length
        pairs, names = add_labelled_pairs(
            builder, phase.stage, stage.pairs, (*phase.path, "pairs"), length, stage.margin
        )
        prompt = builder.shortest(map(builder.part, stage.pairs), "train", "shortest_prompt")
        _check_fits(builder, phase, 2 * prompt, "pair")
        return {"pairs": pairs}, {
            "loss": stage.loss,
            "source_names": names,
            "data_seed": stage.data_seed,
            "lora": stage.lora,
            "max_repetition": stage.max_repetition,
        }
    mixture = builder.part(Reference.parse(planned.mixture))
    return {"mixture": mixture}, {
        "source_names": [read.name for read in corpora(builder.graph, mixture.name)],
        "packing": builder.graph.trajectories[phase.name].packing,
    }


def _check_fits(builder: Builder, phase: Phase, shortest: int, what: str) -> None:
    """Checks that the shortest conversation or pair, of `shortest` tokens or more, fits into a sequence."""
    length = builder.graph.trajectories[phase.name].sequence_length
    if shortest > length:
        message = f"no {what} fits into a sequence of {length} tokens; the shortest has {shortest} or more"
        builder.problem((*phase.path, "sequence_length"), message, f"set {shortest} or more.")


def add_labelled_pairs(
    builder: Builder,
    name: str,
    sources: list[Reference],
    path: FieldPath,
    max_tokens: int,
    margin: str | None = None,
) -> tuple[Input, list[str]]:
    """Adds the pairs of conversations as tokens, once per stage; also returns the names of the conversations
    in the order of the part."""
    read = sorted((builder.part(source) for source in sources), key=lambda one: one.fingerprint)
    names = [one.name for one in read]
    if (existing := builder.graph.nodes.get(f"{name}/pairs")) is not None:
        return reads(existing), names
    tokenizer = builder.tokenizer_of(read[0])
    for one in read[1:]:
        builder.same_tokenizer(path, one.name, builder.tokenizer_of(one), tokenizer)
    inputs = {f"conversations:{index}": one for index, one in enumerate(read)} | {"tokenizer": tokenizer}
    part = LabelledPairsPart(max_tokens=max_tokens, margin=margin)
    return reads(builder.node(f"{name}/pairs", name, part, inputs, kind="labelled_pairs")), names


def _labelled_pairs(builder: Builder, stage: DpoStage, phase: Phase) -> dict[str, Input]:
    """The pairs of a stage, and their log-probabilities under the model that it starts from."""
    trajectory = builder.graph.trajectories[phase.name]
    path, length = (*phase.path, "pairs"), trajectory.sequence_length
    pairs, _ = add_labelled_pairs(builder, phase.stage, stage.pairs, path, length)
    reference = builder.graph.nodes.get(f"{phase.stage}/log_probabilities")
    if reference is None:
        assert phase.parent is not None
        checkpoint, _ = builder.checkpoint(phase.parent, (*phase.path, "from"))
        reference = add_log_probabilities(builder, phase.stage, pairs, checkpoint, trajectory)
    return {"pairs": pairs, "log_probabilities": reads(reference)}


def _packed(builder: Builder, phase: Phase, mixture: Input, trajectory: Trajectory) -> dict[str, Input]:
    """The rows of packed documents, for best-fit packing only: one part per corpus, shared by the phases of
    the stage."""
    found: dict[str, Input] = {}
    for index, corpus in enumerate(
        corpora(builder.graph, mixture.name) if trajectory.packing == "best-fit" else []
    ):
        name = f"{phase.stage}/packing-{trajectory.sequence_length}/{corpus.name}"
        node = builder.graph.nodes.get(name)
        if node is None:
            part = PackingPart(sequence_length=trajectory.sequence_length)
            node = builder.node(name, phase.stage, part, {"corpus": corpus}, kind="packing")
        found[f"packed:{index}"] = reads(node)
    return found


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
    sources = sorted(
        {
            name
            for node in builder.graph.segments(phase.name)
            for name in getattr(node.part, "source_names", [])
        }
    )
    for index, metric in enumerate(phase.settings.checkpoint.best):
        path: FieldPath = (*phase.path, "checkpoint", "best", index)
        wanted = metric.removeprefix("val_loss").removeprefix("/")
        if not phase.settings.validation.interval:
            message = f"'{metric}' is a held-out loss, but '{phase.name}' measures none"
            builder.problem(path, message, "give it a validation.interval.")
        elif wanted and wanted not in sources:
            message = f"'{metric}' is the held-out loss of '{wanted}', which '{phase.name}' does not train on"
            builder.problem(path, message, did_you_mean(wanted, sources))


def _tokenizer(builder: Builder, phase: Phase, data: dict[str, Input], trajectory: Trajectory) -> Input:
    tokenizer = builder.tokenizer_of(next(iter(data.values())))
    part = builder.graph.nodes[tokenizer.name].part
    assert isinstance(part, TokenizerPart)
    start = trajectory.parent
    known = start is not None and builder.graph.trajectories[start.phase].origin != "import"
    if not known and part.vocab_size > trajectory.model.vocab_size:  # otherwise the parent has the problem
        embeddings = f"the model has {trajectory.model.vocab_size:,} embeddings"
        message = f"{embeddings}, tokenizer '{tokenizer.name}' has {part.vocab_size:,} ids"
        path: FieldPath = (*phase.path, *(("model", "vocab_size") if start is None else ("from",)))
        builder.problem(path, message, f"set the model's vocab_size to {part.vocab_size}.")
    return tokenizer


def add_merge(builder: Builder, name: str) -> None:
    """Adds one part, whose result is its checkpoint 1."""
    stage = cast(MergeStage, builder.pipeline.stages[name])
    if name not in builder.graph.trajectories:
        return
    weights = stage.weights or [1.0] * len(stage.checkpoints)
    pairs = zip(stage.checkpoints, weights, strict=True)
    read = [
        (builder.checkpoint(ref, ("stages", name, "checkpoints", index))[0], weight)
        for index, (ref, weight) in enumerate(pairs)
    ]
    if len({checkpoint.hashed for checkpoint, _ in read}) < len(read):
        path = ("stages", name, "checkpoints")
        builder.problem(path, "two of these are the same checkpoint", "add their weights.")
    read.sort(key=lambda pair: pair[0].hashed)
    trajectory = builder.graph.trajectories[name]
    tokenizer = builder.tokenizer_of(read[0][0])
    inputs = {f"checkpoint:{index}": checkpoint for index, (checkpoint, _) in enumerate(read)}
    if stage.base is not None:
        inputs["base"] = builder.checkpoint(stage.base, ("stages", name, "base"))[0]
        if inputs["base"].hashed in {checkpoint.hashed for checkpoint, _ in read}:
            message = f"'{stage.base}' is both base and one of checkpoints, so they do not differ"
            builder.problem(("stages", name, "base"), message, "name what the others were trained from.")
    for role, checkpoint in inputs.items():
        path = ("stages", name, role.partition(":")[0].replace("checkpoint", "checkpoints"))
        builder.same_tokenizer(path, checkpoint.name, builder.tokenizer_of(checkpoint), tokenizer)
    part = MergePart(
        model=trajectory.model,
        weights=[weight for _, weight in read],
        **{field: getattr(stage, field) for field in MergeRule.model_fields},
    )
    inputs["tokenizer"] = tokenizer
    builder.node(name, name, part, inputs, start_step=0, end_step=1, phase=name)


def add_rewrite(builder: Builder, name: str) -> None:
    """Adds one part, which states how the model is computed; stages that start from it read its input."""
    if name in builder.graph.trajectories:
        read, trajectory = builder.checkpoint(Reference(name), ("stages", name, "from"))
        builder.node(name, name, RewritePart(model=trajectory.model), {"checkpoint": read})


def best_steps(graph: Graph, pipeline: Pipeline, store: Store) -> dict[str, int]:
    """The kept checkpoint with the lowest value for each `@best:` reference whose stage has finished, and the
    chosen candidate for each selection that has finished. Adds a note for each that is not known yet."""
    found: dict[str, int] = {}
    selections = [(node, node.part) for node in graph.nodes.values() if isinstance(node.part, SelectPart)]
    for node, part in selections:
        if (choice := node.artifact(store)).complete:
            found[node.name] = int(choice.metric("chosen"))
        elif any(read.node == node.name for other in graph.nodes.values() for read in other.inputs.values()):
            note = f"'{node.name}' is chosen when its candidates have finished; until then it is planned as"
            graph.notes.append(f"{note} {part.names[0]}")
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
            found[str(ref)] = min(values, key=lambda step: (values[step], step))
    return found


def _nothing_measured(path: FieldPath, ref: Reference, kept: list[Checkpoint]) -> SpecError:
    """The error for an `@best:` metric that no kept checkpoint of a finished stage has."""
    steps = ", ".join(str(checkpoint.step) for checkpoint in kept) or "none"
    measured = sorted({name for checkpoint in kept for name in checkpoint.facts.get("validation") or {}})
    there = f"; they have {', '.join(f'val_loss/{name}' for name in measured)}" if measured else ""
    message = f"'{ref}': {ref.best} was measured at none of the steps that '{ref.stage}' kept, {steps}{there}"
    fix = "name one of these metrics, make validation.interval divide checkpoint.interval, or name a step."
    return SpecError.of(path, message, fix)
