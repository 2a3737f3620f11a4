"""Reads the content of the report from a plan and its store as plain values, without presentation.

Invariant: it only reads, through markers; a missing result is a state ("not run"), and an unreadable file is
a note, never an error.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

from pydantic import ValidationError

from flows.planning.graph import Input, Node
from flows.planning.mixtures import by_size, corpora, learned_in
from flows.planning.mixtures import shares as mixture_shares
from flows.planning.parts.consumed_samples import ancestry_of
from flows.planning.plan import Plan, Step
from flows.report.classifiers import Classified
from flows.report.experiments import Experiment, experiment
from flows.report.history import Curve, curve
from flows.report.results import (
    ComparedTokenizers,
    Evaluation,
    Gate,
    is_evaluation,
    number,
    numbers,
    read_rewards,
    read_samples,
    side_by_side,
)
from flows.report.run_data import Part, Run, Share, Source, Stage, State
from flows.report.task_answers import TaskAnswers, by_part, read_answers
from infra.store import Artifact, StoreError
from infra.store.documents import CheckpointMarker, Manifest
from specs.anomalies import remark
from specs.errors import counted
from specs.planted import PlantedRecord, planted_in
from specs.published import Compared
from specs.stages.evaluate_reward import EvaluateRewardStage
from specs.stages.evaluate_tokenizers import EvaluateTokenizersStage
from specs.stages.gates import Measuring
from specs.stages.mixture import MixturePart
from specs.stages.training import Segment
from specs.tokenizer_comparison import Comparison

FOLDED = 4  # least number of variants of a stage that share one box of the graph
LISTED = 30  # entries of a long list in the settings
TOKENIZERS = EvaluateTokenizersStage.kind_name()
REWARDS = EvaluateRewardStage.kind_name()


def collect(plan: Plan) -> Run:
    """Reads the content of the report."""
    notes = list(plan.graph.notes)
    parts = {name: _part(plan, step, notes) for name, step in plan.steps.items()}
    names = dict.fromkeys(part.stage for part in parts.values())  # inputs first
    stages = [_stage(plan, name, [part for part in parts.values() if part.stage == name]) for name in names]
    evaluations, sampled, answers = [], [], list[TaskAnswers]()
    tokenizers = [_tokenizers(plan, part, notes) for part in parts.values() if part.kind == TOKENIZERS]
    for part in parts.values():
        if is_evaluation(part.kind, part.inputs, metrics := numbers(part.metrics)):
            evaluations.append(_evaluation(plan, part, metrics, notes))
        if "samples.json" in part.files:
            sampled.append(read_samples(_document(plan, part, "samples.json", notes)))
        if part.kind == "harness" and "shown.json" in part.files:
            answers += read_answers(part.name, _document(plan, part, "shown.json", notes))
    models = [model for node in plan.graph.nodes.values() if (model := getattr(node.part, "model", None))]
    return Run(
        name=plan.pipeline.name,
        description=plan.pipeline.description,
        store=plan.store.url,
        parameters=max((model.parameters for model in models), default=0),
        stages=stages,
        boxes=_folded(plan, stages),
        curves=_curves(plan, stages, notes),
        mixtures=_mixtures(plan, parts),
        evaluations=evaluations,
        agreements=[
            _evaluation(plan, part, found, notes)
            for part in parts.values()
            if part.kind == REWARDS and (found := numbers(part.metrics))
        ],
        tokenizers=[compared for compared in tokenizers if compared is not None],
        classifiers=[
            _classified(plan, part) for part in parts.values() if part.kind == "classifier" and part.metrics
        ],
        prompts=side_by_side(sampled),
        answers=by_part(answers),
        experiments=_experiments(plan, stages),
        sources=_sources(plan),
        planted=_planted(plan, stages),
        notes=notes,
    )


def _part(plan: Plan, step: Step, notes: list[str]) -> Part:
    node, metrics = step.node, dict[str, Any]()
    document: Manifest | CheckpointMarker | None = None
    artifact = node.artifact(plan.store)
    try:
        if step.action == "reuse":
            document = artifact.manifest
            metrics = document.metrics
        elif step.resume_step is not None:
            document = artifact.checkpoint(step.resume_step).marker
            metrics = {name: fact for name, fact in document.facts.items() if name != "passes"}
    except StoreError as error:
        notes.append(str(error))
    if document is not None and (text := remark(document.facts)):
        notes.append(f"{node.name}: {text}")
    state: State = "finished" if step.action == "reuse" else ("partial" if step.stored else "not run")
    done = node.end_step if step.action == "reuse" else step.resume_step
    return Part(
        name=node.name,
        stage=node.stage,
        kind=node.kind,
        state="gate failed" if step.gate_failures else state,
        reason=step.reason,
        fingerprint=node.fingerprint,
        path=node.path if step.stored else None,
        steps=node.steps,
        done_steps=done - node.start_step if done is not None else 0,
        tokens=node.tokens,
        done_tokens=node.tokens_until(done) if done is not None else 0,
        flops=step.flops,
        inputs=node.inputs,
        settings={
            "part": _shortened(node.part.to_json()),
            "launch": node.launch.to_json(),
        },
        metrics=metrics,
        passes=_fact(artifact, done, "passes"),
        seconds=document.seconds.model_dump() if document and document.seconds else {},
        files={name: record.size for name, record in document.files.items()} if document else {},
        versions=document.versions if isinstance(document, Manifest) else {},
        created=document.created if document else "",
    )


def _fact(artifact: Artifact, step: int | None, name: str) -> dict[str, float]:
    """The numbers that a checkpoint states as a fact: `passes` over each corpus, by fingerprint, from new
    weights; `epochs` of each corpus, by name, in the samples of its mixture. Empty without the checkpoint."""
    try:
        return numbers(artifact.checkpoint(step).facts.get(name)) if step is not None else {}
    except StoreError:
        return {}


def _shortened(value: Any) -> Any:
    """The value with long lists (files of a source) shortened."""
    if isinstance(value, dict):
        return {name: _shortened(item) for name, item in value.items()}
    if isinstance(value, list):
        more = [f"… and {len(value) - LISTED:,} more"] if len(value) > LISTED else []
        return [_shortened(item) for item in value[:LISTED]] + more
    return value


def _stage(plan: Plan, name: str, parts: list[Part]) -> Stage:
    nodes = plan.graph.of(name)
    reads = {plan.graph.nodes[parent].stage: None for node in nodes for parent in plan.graph.parents(node)}
    spec = plan.pipeline.stages[name]
    return Stage(
        name,
        spec.kind,
        spec.description,
        parts,
        [read for read in reads if read != name],
        [other for other in plan.graph.after.get(name, ()) if other not in reads],
        _result(plan, name, parts),
    )


def _result(plan: Plan, name: str, parts: list[Part]) -> dict[str, Any]:
    """The numbers of a stage as a whole: in a chain, those of the last part that has any; counts of
    independent parts are summed."""
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


def _folded(plan: Plan, stages: list[Stage]) -> list[Stage]:
    """The stages, with many variants of a matrix joined into one, inputs first. Where stages would then need
    each other, nothing is joined."""
    document = plan.pipeline._document
    many = {
        name: made for name, made in (document.variants if document else {}).items() if len(made) >= FOLDED
    }
    names = {variant: name for name, made in many.items() for variant in made}
    found: dict[str, Stage] = {}
    for stage in stages:
        name = names.get(stage.name, stage.name)
        reads, after = (
            [names.get(other, other) for other in others] for others in (stage.reads, stage.after)
        )
        so_far = found.get(
            name, Stage(name, stage.kind, "", [], [], [], stage.result if name == stage.name else {})
        )
        found[name] = replace(
            so_far,
            parts=so_far.parts + stage.parts,
            reads=[other for other in dict.fromkeys(so_far.reads + reads) if other != name],
            after=[other for other in dict.fromkeys(so_far.after + after) if other != name],
            variants=[*so_far.variants, stage],
        )
    ordered: dict[str, Stage] = {}
    while len(ordered) < len(found):
        ready = [
            stage
            for name, stage in found.items()
            if name not in ordered and ordered.keys() >= {*stage.reads, *stage.after}
        ]
        if not ready:
            return stages
        ordered |= {stage.name: stage for stage in ready[:1]}
    return list(ordered.values())


def _experiments(plan: Plan, stages: list[Stage]) -> dict[str, Experiment]:
    """The content of the recipe's figures, by name."""
    results = {stage.name: _numbers_of(plan, stage) for stage in stages}
    return {name: experiment(figure, results) for name, figure in plan.pipeline.figures.items()}


def _numbers_of(plan: Plan, stage: Stage) -> dict[str, float]:
    """The numbers of a finished stage for figures: those of its last part; for training also the held-out
    losses at its end."""
    part, node = stage.parts[-1], plan.graph.of(stage.name)[-1]
    if part.state not in ("finished", "gate failed"):
        return {}
    losses = {f"val_loss/{source}": loss for source, loss in numbers(part.metrics.get("validation")).items()}
    if not losses or node.end_step is None or part.metrics.get("validation_step") != node.end_step:
        return numbers(part.metrics)
    return numbers(part.metrics) | losses | {"val_loss": sum(losses.values()) / len(losses)}


def _curves(plan: Plan, stages: list[Stage], notes: list[str]) -> list[Curve]:
    curves = []
    for stage in stages:
        try:
            found = curve(plan, stage.name)
        except (StoreError, ValueError) as error:
            notes.append(f"the history of {stage.name} could not be read: {error}")
            continue
        if found is not None:
            curves.append(found)
            if found.broken:
                notes.append(
                    f"{stage.name}: {counted(found.broken, 'recorded value is', 'recorded values are')} not"
                    " finite and left out of the curves"
                )
    return curves


def _mixtures(plan: Plan, parts: dict[str, Part]) -> dict[str, list[Share]]:
    """The shares by name of the mixture, with passes of finished training. A mixture by size is left out
    until its sources are built."""
    found = {}
    for node in plan.graph.nodes.values():
        if not isinstance(node.part, MixturePart):
            continue
        read = {entry.fingerprint: entry for entry in corpora(plan.graph, node.name)}
        trained = [
            _epochs(plan, plan.graph.nodes[part.name], part, node)
            for part in parts.values()
            if part.done_steps and "mixture" in part.inputs and part.inputs["mixture"].name == node.name
        ]
        sizes = {
            entry.name: parts[entry.name].metrics.get("train", {}).get("tokens") for entry in read.values()
        }
        if None in sizes.values() and by_size(plan.graph, node.name):
            continue
        known = learned_in(plan.store)
        asked = mixture_shares(plan.graph, node.name, lambda corpus, sizes=sizes: sizes[corpus.name], known)  # type: ignore[misc]  # bound here
        shares = [
            _share(entry, float(asked[fingerprint]), parts, trained) for fingerprint, entry in read.items()
        ]
        found[node.name] = sorted(shares, key=lambda share: (-share.share, share.source))
    return found


def _epochs(plan: Plan, node: Node, part: Part, mixture: Node) -> dict[str, float]:
    """The passes over each corpus, by name, that a segment and its ancestry have made through a mixture.
    Sequences of another length or packing draw from the beginning of the mixture, so their passes add up."""
    most: dict[tuple[str, int, str], float] = {}
    for segment, step in ancestry_of(plan.graph, node, (node.start_step or 0) + part.done_steps):
        read = segment.inputs.get("mixture")
        if read is None or read.name != mixture.name or not isinstance(segment.part, Segment):
            continue
        for name, epochs in _fact(segment.artifact(plan.store), step, "epochs").items():
            key = name, segment.part.sequence_length, segment.part.packing
            most[key] = max(most.get(key, 0.0), epochs)
    found = dict.fromkeys((name for name, _, _ in most), 0.0)
    for (name, _, _), epochs in most.items():
        found[name] += epochs
    return found


def _share(entry: Input, share: float, parts: dict[str, Part], trained: list[dict[str, float]]) -> Share:
    corpus = parts[entry.name].metrics.get("train", {}) if entry.name in parts else {}
    through = [epochs[entry.name] for epochs in trained if entry.name in epochs]
    in_all = [part.passes[entry.fingerprint] for part in parts.values() if entry.fingerprint in part.passes]
    return Share(
        entry.name, share, corpus.get("tokens"), max(through, default=None), max(in_all, default=None)
    )


def _evaluation(plan: Plan, part: Part, metrics: dict[str, float], notes: list[str]) -> Evaluation:
    read = part.inputs.get("checkpoint")
    stage = plan.graph.nodes[read.node].stage if read and read.node else part.stage
    label = f"{read.name}@step={read.step}" if read else part.name
    rewards = (
        read_rewards(_document(plan, part, "rewards.json", notes)) if "rewards.json" in part.files else None
    )
    return Evaluation(
        part.name,
        part.stage,
        stage,
        label,
        metrics,
        _gates(plan, part.stage, metrics),
        _published(plan, part.stage, metrics),
        rewards,
    )


def _tokenizers(plan: Plan, part: Part, notes: list[str]) -> ComparedTokenizers | None:
    """A comparison of tokenizers; None, with a note, when it cannot be read."""
    if "evaluation.json" not in part.files:
        return None
    try:
        found = Comparison.model_validate(_document(plan, part, "evaluation.json", notes))
    except ValidationError as error:
        notes.append(f"evaluation.json of {part.name} is not a comparison: {error.errors()[0]['msg']}")
        return None
    stage = cast(EvaluateTokenizersStage, plan.pipeline.stages[part.stage])
    names = [name for name in stage.tokenizers if name in found.tokenizers]
    metrics = numbers(part.metrics)
    gates, published = _gates(plan, part.stage, metrics), _published(plan, part.stage, metrics)
    return ComparedTokenizers(part.name, names, found, gates, published)


def _classified(plan: Plan, part: Part) -> Classified:
    facts = Artifact(plan.store, part.path or "").manifest.facts
    return Classified.of(part.name, part.metrics, facts, _gates(plan, part.stage, numbers(part.metrics)))


def _gates(plan: Plan, stage: str, metrics: dict[str, float]) -> list[Gate]:
    gates = []
    for gate in getattr(plan.pipeline.stages[stage], "gates", ()):
        bounds = [
            f"{sign} {bound:g}" for sign, bound in (("≥", gate.min), ("≤", gate.max)) if bound is not None
        ]
        gates.append(
            Gate(gate.metric, " and ".join(bounds), number(metrics.get(gate.metric)), gate.failure(metrics))
        )
    return gates


def _published(plan: Plan, stage: str, metrics: dict[str, float]) -> list[Compared]:
    spec = plan.pipeline.stages[stage]
    scores = spec.reference if isinstance(spec, Measuring) else {}
    return [score.compared(metric, metrics) for metric, score in scores.items()]


def _document(plan: Plan, part: Part, name: str, notes: list[str]) -> Any:
    """A JSON file of an artifact; None, with a note, when it cannot be read."""
    try:
        return Artifact(plan.store, part.path or "").json(name)
    except (StoreError, ValueError) as error:
        notes.append(f"{name} of {part.name} could not be read: {error}")
        return None


def _planted(plan: Plan, stages: list[Stage]) -> list[tuple[str, PlantedRecord]]:
    return [
        (part.name, record)
        for stage in stages
        for part in stage.parts
        for record in planted_in(plan.graph.nodes[part.name].identity, part.metrics)
    ]


def _sources(plan: Plan) -> list[Source]:
    found = []
    for name, listing in plan.graph.listings.items():
        facts = plan.graph.facts_of(plan.pipeline, name)
        found.append(Source(name, facts, len(listing.files), listing.bytes, plan.graph.digests.get(name, "")))
    return found
