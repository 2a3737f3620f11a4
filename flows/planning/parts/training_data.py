"""The data of a segment: its inputs, and the fields that follow from them, by what its kind trains on."""

from collections.abc import Callable
from typing import Any, NamedTuple, cast

from flows.planning.graph import Input
from flows.planning.mixtures import corpora
from flows.planning.parts.builder import Builder, reads
from flows.planning.parts.preferences import (
    add_log_probabilities,
    check_preferences,
    conversations,
    preference_inputs,
)
from specs.errors import FieldPath
from specs.settings import Phase
from specs.stages.dpo import DpoStage
from specs.stages.preference_training import PreferenceTraining
from specs.stages.reward_model import LabelledPairsPart, RewardModelStage
from specs.stages.sft import SftStage
from specs.stages.training import PackingPart, TrainingStage
from specs.trajectory import SegmentPlan, Trajectory
from specs.units import Reference


class SegmentData(NamedTuple):
    """The data of a segment."""

    inputs: dict[str, Input]
    fields: dict[str, Any]
    field: str  # of the stage, which names the inputs


def _mixture(
    builder: Builder, stage: TrainingStage, phase: Phase, planned: SegmentPlan, start: Input | None
) -> SegmentData:
    mixture = builder.part(Reference.parse(planned.mixture))
    names = [corpus.name for corpus in corpora(builder.graph, mixture.name)]
    return SegmentData({"mixture": mixture}, {"source_names": names}, "mixture")


def _conversations(
    builder: Builder, stage: TrainingStage, phase: Phase, planned: SegmentPlan, start: Input | None
) -> SegmentData:
    stage = cast(SftStage, stage)
    chosen = sorted(
        ((builder.part(Reference.parse(part)), repeats) for part, repeats in stage.conversations.items()),
        key=lambda pair: pair[0].fingerprint,
    )
    shortest = builder.shortest([source for source, _ in chosen], "train")
    _check_fits(builder, phase, shortest if stage.longer == "drop" else 0, "conversation")
    inputs = {f"conversations:{index}": source for index, (source, _) in enumerate(chosen)}
    names = [source.name for source, _ in chosen]
    fields = {"repeats": [repeats for _, repeats in chosen], "source_names": names}
    return SegmentData(inputs, fields, "conversations")


def _preferences(
    builder: Builder, stage: TrainingStage, phase: Phase, planned: SegmentPlan, start: Input | None
) -> SegmentData:
    stage = cast(PreferenceTraining, stage)
    assert start is not None, "the reference model of the loss"
    check_preferences(builder, stage, phase, start)
    fields = {"source_names": list(stage.preferences), "repeats": list(stage.preferences.values())}
    return SegmentData(preference_inputs(builder, stage, phase), fields, "preferences")


def _pairs_with_reference(
    builder: Builder, stage: TrainingStage, phase: Phase, planned: SegmentPlan, start: Input | None
) -> SegmentData:
    """The pairs of a stage, and their log-probabilities under the model that it starts from."""
    stage = cast(DpoStage, stage)
    trajectory = builder.graph.trajectories[phase.name]
    path, length = (*phase.path, "pairs"), trajectory.settings.sequence_length
    pairs, _ = add_labelled_pairs(builder, phase.stage, stage.pairs, path, length)
    assert start is not None, "the reference model of the loss"
    reference = add_log_probabilities(builder, phase.stage, pairs, start, trajectory)
    return SegmentData({"pairs": pairs, "log_probabilities": reads(reference)}, {}, "pairs")


def _pairs(
    builder: Builder, stage: TrainingStage, phase: Phase, planned: SegmentPlan, start: Input | None
) -> SegmentData:
    stage = cast(RewardModelStage, stage)
    path, length = (*phase.path, "pairs"), builder.graph.trajectories[phase.name].settings.sequence_length
    pairs, names = add_labelled_pairs(builder, phase.stage, stage.pairs, path, length, stage.margin)
    prompt = builder.shortest(map(builder.part, stage.pairs), "train", "shortest_prompt")
    _check_fits(builder, phase, 2 * prompt, "pair")
    return SegmentData({"pairs": pairs}, {"source_names": names}, "pairs")


DATA: dict[str, Callable[[Builder, TrainingStage, Phase, SegmentPlan, Input | None], SegmentData]] = {
    "mixture": _mixture,
    "conversations": _conversations,
    "preferences": _preferences,
    "pairs with reference": _pairs_with_reference,
    "pairs": _pairs,
}
"""By `TrainingStage.trains_on`. The last argument is the checkpoint from which the phase starts."""


def _check_fits(builder: Builder, phase: Phase, shortest: int, what: str) -> None:
    """Checks that the shortest conversation or pair, of `shortest` tokens or more, fits into a sequence."""
    length = builder.graph.trajectories[phase.name].settings.sequence_length
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
    inputs = conversations(builder, sources, path, None)
    part = LabelledPairsPart(max_tokens=max_tokens, margin=margin)
    node = builder.node(f"{name}/pairs", name, part, inputs, kind="labelled_pairs")
    return reads(node), [input_.name for role, input_ in inputs.items() if role != "tokenizer"]


def packed(builder: Builder, phase: Phase, mixture: Input, trajectory: Trajectory) -> dict[str, Input]:
    """The rows of packed documents, for best-fit packing only: one part per corpus, shared by the phases of
    the stage."""
    settings, rows = trajectory.settings, dict[str, Input]()
    if settings.packing != "best-fit":
        return rows
    for index, corpus in enumerate(corpora(builder.graph, mixture.name)):
        name = f"{phase.stage}/packing-{settings.sequence_length}/{corpus.name}"
        part = PackingPart(sequence_length=settings.sequence_length)
        node = builder.node(name, phase.stage, part, {"corpus": corpus}, kind="packing")
        rows[f"packed:{index}"] = reads(node)
    return rows
