"""Reads the content of the report from a plan and its store as plain values, without presentation.

Invariant: it only reads, through markers; a missing result is a state ("not run"), a damaged file a note.
"""

from graphlib import CycleError, TopologicalSorter
from typing import Any, cast

from pydantic import ValidationError

from flows.planning.graph import Node
from flows.planning.mixtures import by_size, corpora, learned_in
from flows.planning.mixtures import shares as mixture_shares
from flows.planning.parts.consumed_samples import ancestry_of
from flows.planning.plan import Plan
from flows.report.experiments import experiment_of
from flows.report.history import Curve, curve
from flows.report.results import (
    Classified,
    ComparedTokenizers,
    Evaluation,
    GateResult,
    is_evaluation,
    number,
    numbers,
    read_answers,
    read_rewards,
    read_samples,
    side_by_side,
)
from flows.report.run_data import RunContent, Share, StageContent
from flows.stored_part import DONE, PlannedPart, planned_parts, planned_source
from infra.store import Artifact, StoreError
from specs.anomalies import remark
from specs.errors import counted
from specs.planted import planted_in
from specs.published import Compared
from specs.stages.evaluate_reward import EvaluateRewardStage
from specs.stages.evaluate_tokenizers import EvaluateTokenizersStage
from specs.stages.training import Segment
from specs.tokenizer_comparison import Comparison

FOLDED = 4  # least number of variants of a stage that share one box of the graph
TOKENIZERS = EvaluateTokenizersStage.kind_name()
REWARDS = EvaluateRewardStage.kind_name()


def collect(plan: Plan) -> RunContent:
    notes = list(plan.graph.notes)
    parts = planned_parts(plan, damages=notes)
    for part in parts.values():
        if text := remark(part.facts):
            notes.append(f"{part.name}: {text}")
    names = dict.fromkeys(part.stage for part in parts.values())  # inputs first
    stages = [_stage(plan, name, [part for part in parts.values() if part.stage == name]) for name in names]
    evaluations, agreements, tokenizers, classifiers, sampled, answers = [], [], [], [], [], {}
    for part in parts.values():
        metrics = numbers(part.metrics)
        if is_evaluation(part.kind, part.inputs, metrics):
            evaluations.append(_evaluation(part, metrics, notes))
        if part.kind == REWARDS and metrics:
            agreements.append(_evaluation(part, metrics, notes))
        if part.kind == TOKENIZERS and (compared := _tokenizers(part, metrics, notes)) is not None:
            tokenizers.append(compared)
        if part.kind == "classifier" and part.metrics:
            classifiers.append(Classified.of(part.name, part.metrics, part.facts, _gates(part, metrics)))
        if "samples.json" in part.files:
            sampled.append(read_samples(_document(part, "samples.json", notes)))
        if part.kind == "harness" and "shown.json" in part.files:
            answers[part.name] = read_answers(_document(part, "shown.json", notes))
    results = {stage.name: _numbers_of(stage) for stage in stages}
    models = [model for node in plan.graph.nodes.values() if (model := getattr(node.part, "model", None))]
    return RunContent(
        name=plan.pipeline.name,
        description=plan.pipeline.description,
        store=plan.store.url,
        parameters=max((model.parameters for model in models), default=0),
        stages=stages,
        boxes=_folded(plan, stages),
        curves=_curves(plan, stages, notes),
        mixtures=_mixtures(plan, parts),
        evaluations=evaluations,
        agreements=agreements,
        tokenizers=tokenizers,
        classifiers=classifiers,
        prompts=side_by_side(sampled),
        answers={name: tasks for name, tasks in answers.items() if tasks},
        experiments={name: experiment_of(spec, results) for name, spec in plan.pipeline.figures.items()},
        sources=[
            planned_source(plan, name, plan.graph.digests.get(name, "")) for name in plan.graph.listings
        ],
        planted=[
            (part.name, record)
            for stage in stages
            for part in stage.parts
            for record in planted_in(part.spec, part.metrics)
        ],
        notes=notes,
    )


def _numbers_at(artifact: Artifact, step: int | None, fact: str) -> dict[str, float]:
    """The numbers that a checkpoint states as a fact: `passes` over each corpus, by fingerprint, from new
    weights; `epochs` of each corpus, by name, in the samples of its mixture. Empty without the checkpoint."""
    try:
        return numbers(artifact.checkpoint(step).facts.get(fact)) if step is not None else {}
    except StoreError:
        return {}


def _stage(plan: Plan, name: str, parts: list[PlannedPart]) -> StageContent:
    nodes = plan.graph.of(name)
    reads = {plan.graph.nodes[parent].stage: None for node in nodes for parent in plan.graph.parents(node)}
    spec = plan.pipeline.stages[name]
    return StageContent(
        name,
        spec.kind,
        spec.description,
        parts,
        [other for other in reads if other != name],
        [other for other in plan.graph.after.get(name, ()) if other not in reads],
        _result(plan, name, parts),
    )


def _result(plan: Plan, name: str, parts: list[PlannedPart]) -> dict[str, Any]:
    """The numbers of a whole stage: of the last part that has any, in a chain; sums of counts otherwise."""
    stored = [numbers(part.metrics) for part in parts if part.metrics]
    if not stored:
        return {}
    if len(plan.graph.ends_of(name)) == 1:
        return stored[-1]
    return {
        key: sum(metrics[key] for metrics in stored)
        for key in ("tokens", "documents")
        if all(key in metrics for metrics in stored)
    }


def _folded(plan: Plan, stages: list[StageContent]) -> list[StageContent]:
    """The stages, inputs first, with a matrix's many variants joined, unless that makes a circle."""
    document = plan.pipeline._document
    many = {
        name: variants
        for name, variants in (document.variants if document else {}).items()
        if len(variants) >= FOLDED
    }
    names = {variant: name for name, variants in many.items() for variant in variants}
    folded: dict[str, StageContent] = {}
    for stage in stages:
        name = names.get(stage.name, stage.name)
        box = folded.setdefault(name, StageContent(name, stage.kind, "", [], [], [], {}))
        if name == stage.name:
            box.result.update(stage.result)
        box.parts.extend(stage.parts)
        box.variants.append(stage)
        for joined, others in ((box.reads, stage.reads), (box.after, stage.after)):
            new = dict.fromkeys(names.get(other, other) for other in others)
            joined += [other for other in new if other not in (name, *joined)]
    order = TopologicalSorter({name: [*box.reads, *box.after] for name, box in folded.items()})
    try:
        return [folded[name] for name in order.static_order()]
    except CycleError:
        return stages


def _numbers_of(stage: StageContent) -> dict[str, float]:
    """The numbers of a finished stage's last part, with the held-out losses at the end of training."""
    part = stage.parts[-1]
    if part.state not in DONE:
        return {}
    losses = {f"val_loss/{source}": loss for source, loss in numbers(part.metrics.get("validation")).items()}
    end = part.node.end_step
    if not losses or end is None or part.metrics.get("validation_step") != end:
        return numbers(part.metrics)
    return numbers(part.metrics) | losses | {"val_loss": sum(losses.values()) / len(losses)}


def _curves(plan: Plan, stages: list[StageContent], notes: list[str]) -> list[Curve]:
    curves = []
    for stage in stages:
        try:
            recorded = curve(plan, stage.name)
        except (StoreError, ValueError) as error:
            notes.append(f"the history of {stage.name} could not be read: {error}")
            continue
        if recorded is not None:
            curves.append(recorded)
            if recorded.broken:
                values = counted(recorded.broken, "recorded value is", "recorded values are")
                notes.append(f"{stage.name}: {values} not finite and left out of the curves")
    return curves


def _mixtures(plan: Plan, parts: dict[str, PlannedPart]) -> dict[str, list[Share]]:
    """Shares by name of the mixture, with passes of training; by size, only when its sources are built."""
    mixtures = {}
    for node in plan.graph.nodes.values():
        if node.kind != "mixture":
            continue
        entries = {entry.fingerprint: entry for entry in corpora(plan.graph, node.name)}
        trained = [
            _epochs(plan, part, node)
            for part in parts.values()
            if part.done_steps and "mixture" in part.inputs and part.inputs["mixture"].name == node.name
        ]
        sizes = {
            entry.name: parts[entry.name].metrics.get("train", {}).get("tokens") for entry in entries.values()
        }
        if None in sizes.values() and by_size(plan.graph, node.name):
            continue
        known = learned_in(plan.store)
        asked = mixture_shares(plan.graph, node.name, lambda corpus, sizes=sizes: sizes[corpus.name], known)  # type: ignore[misc]  # bound here
        passes_of = [_numbers_at(part.artifact, part.done_until, "passes") for part in parts.values()]
        shares = []
        for fingerprint, entry in entries.items():
            name, share = entry.name, float(asked[fingerprint])
            through = max((epochs[name] for epochs in trained if name in epochs), default=None)
            in_all = max((of[fingerprint] for of in passes_of if fingerprint in of), default=None)
            shares.append(Share(name, share, sizes[name], through, in_all))
        mixtures[node.name] = sorted(shares, key=lambda share: (-share.share, share.source))
    return mixtures


def _epochs(plan: Plan, part: PlannedPart, mixture: Node) -> dict[str, float]:
    """The passes over each corpus, by name, that a segment and its ancestry have made through a mixture.
    Sequences of another length or packing draw from the beginning of the mixture, so their passes add up."""
    most: dict[tuple[str, int, str], float] = {}
    for segment, step in ancestry_of(plan.graph, part.node, part.done_until or 0):
        drawn = segment.inputs.get("mixture")
        if drawn is None or drawn.name != mixture.name or not isinstance(segment.part, Segment):
            continue
        for name, epochs in _numbers_at(segment.artifact(plan.store), step, "epochs").items():
            key = name, segment.part.sequence_length, segment.part.packing
            most[key] = max(most.get(key, 0.0), epochs)
    passes = dict.fromkeys((name for name, _, _ in most), 0.0)
    for (name, _, _), epochs in most.items():
        passes[name] += epochs
    return passes


def _evaluation(part: PlannedPart, metrics: dict[str, float], notes: list[str]) -> Evaluation:
    checkpoint = part.inputs.get("checkpoint")
    stage = part.plan.graph.nodes[checkpoint.node].stage if checkpoint and checkpoint.node else part.stage
    label, gates, published = (
        checkpoint.label if checkpoint else part.name,
        _gates(part, metrics),
        _published(part, metrics),
    )
    rewards = read_rewards(_document(part, "rewards.json", notes)) if "rewards.json" in part.files else None
    return Evaluation(part.name, part.stage, stage, label, metrics, gates, published, rewards)


def _tokenizers(part: PlannedPart, metrics: dict[str, float], notes: list[str]) -> ComparedTokenizers | None:
    """A comparison of tokenizers; None, with a note, when it cannot be read."""
    if "evaluation.json" not in part.files:
        return None
    try:
        comparison = Comparison.model_validate(_document(part, "evaluation.json", notes))
    except ValidationError as error:
        notes.append(f"evaluation.json of {part.name} is not a comparison: {error.errors()[0]['msg']}")
        return None
    stage = cast(EvaluateTokenizersStage, part.stated)
    names = [name for name in stage.tokenizers if name in comparison.tokenizers]
    return ComparedTokenizers(part.name, names, comparison, _gates(part, metrics), _published(part, metrics))


def _gates(part: PlannedPart, metrics: dict[str, float]) -> list[GateResult]:
    gates = []
    for gate in getattr(part.stated, "gates", ()):
        bounds = [
            f"{sign} {bound:g}" for sign, bound in (("≥", gate.min), ("≤", gate.max)) if bound is not None
        ]
        measured = number(metrics.get(gate.metric))
        gates.append(GateResult(gate.metric, " and ".join(bounds), measured, gate.failure(metrics)))
    return gates


def _published(part: PlannedPart, metrics: dict[str, float]) -> list[Compared]:
    return [score.compared(metric, metrics) for metric, score in part.stated.published_scores().items()]


def _document(part: PlannedPart, name: str, notes: list[str]) -> Any:
    """A JSON file of an artifact; None, with a note, when it cannot be read."""
    try:
        return part.artifact.json(name)
    except (StoreError, ValueError) as error:
        notes.append(f"{name} of {part.name} could not be read: {error}")
        return None
