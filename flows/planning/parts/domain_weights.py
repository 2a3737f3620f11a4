"""Learned weights: the sources for which a `domain_weights` stage learns them, and the mixtures that draw by
them."""

from fractions import Fraction
from typing import Any, cast

from flows.planning.graph import Input
from flows.planning.mixtures import by_size, corpora, is_learned, shares
from flows.planning.parts.builder import Builder, reads
from specs.errors import FieldPath, did_you_mean
from specs.settings import Phase
from specs.stages.domain_weights import DomainWeightsSegment, DomainWeightsStage
from specs.stages.mixture import Learned, MixtureStage
from specs.stages.training import TrainingStage
from specs.trajectory import SegmentPlan
from specs.units import Reference


def domain_fields(
    builder: Builder,
    stage: TrainingStage,
    phase: Phase,
    planned: SegmentPlan,
    name: str,
    inputs: dict[str, Input],
    fields: dict[str, Any],
) -> tuple[dict[str, Input], dict[str, Any]]:
    """No further inputs, and the sources of the segment. Adds problems for sources that are not drawn equally
    or are too few, for targets that are not among the sources, and for a batch that does not have equally
    many sequences of each source on every process."""
    stage = cast(DomainWeightsStage, stage)
    sources = corpora(builder.graph, inputs["mixture"].name)
    _check_mixture(builder, phase, inputs["mixture"], len(sources))
    names = [source.name for source in sources]
    targets = []
    for index, ref in enumerate(stage.targets):
        named = builder.part(ref)
        positions = [place for place, source in enumerate(sources) if source.fingerprint == named.fingerprint]
        targets += positions
        if not positions:
            message = f"target '{ref}' is not a source of mixture '{planned.mixture}'"
            fix = f"{did_you_mean(str(ref), names)} Or add it to the mixture."
            builder.problem((*phase.path, "targets", index), message, fix)
    if len(sources) - len(targets) < 2:
        message = f"{len(targets)} of {len(sources)} sources are targets, so fewer than two have a weight"
        builder.problem(
            (*phase.path, "mixture"), message, "give the mixture two sources that are not targets."
        )
    ranks = builder.pipeline.launch_of(stage).data_parallel
    unit = len(sources) * ranks
    if planned.batch % unit:
        path: FieldPath = (*phase.path, "global_batch_size")
        each = f"every step needs equally many sequences of each of {len(sources)} sources"
        each += f" on each of {ranks} data-parallel processes" if ranks > 1 else ""
        message = f"a batch of {planned.batch} sequences is not possible: {each}"
        builder.problem(path, message, f"use a multiple of {unit}.")
    return {}, {"sources": len(sources), "targets": sorted(targets)}


def _check_mixture(builder: Builder, phase: Phase, mixture: Input, number: int) -> None:
    """Checks that a mixture draws equally from its sources: a step has equally many sequences of every
    source, and the use of the sources is counted by the shares of the mixture."""
    graph, stage = builder.graph, builder.graph.nodes[mixture.name].stage
    drawn = cast(MixtureStage, builder.pipeline.stages[stage])
    equal = not (drawn.anneal or by_size(graph, mixture.name) or is_learned(graph, mixture.name))
    if not equal or set(shares(graph, mixture.name, lambda node: 1).values()) != {Fraction(1, number)}:
        message = f"mixture '{stage}' does not draw equally from its sources; '{phase.name}' does"
        builder.problem((*phase.path, "mixture"), message, "name a mixture whose weights are all 1.")


def learned_sources(builder: Builder, name: str, learned: Learned) -> tuple[list[tuple[Input, int]], Input]:
    """The sources of a mixture whose weights are learned, each with the position of its weight, and the
    segment that learns them."""
    segment = builder.graph.segments(learned.from_.stage)[-1]
    among = corpora(builder.graph, segment.inputs["mixture"].name)
    weighted = [among[source] for source in cast(DomainWeightsSegment, segment.part).weighted]
    weights = reads(segment, segment.end_step)
    if learned.sources is None:
        return [(source, position) for position, source in enumerate(weighted)], weights
    position_of = {source.fingerprint: position for position, source in enumerate(weighted)}
    chosen = []
    for source, domain in learned.sources.items():
        named = builder.part(domain.as_).fingerprint
        if named not in position_of:
            path = ("stages", name, "learned", "sources", source)
            message = f"'{learned.from_}' learns no weight for '{domain.as_}'"
            fix = did_you_mean(str(domain.as_), [corpus.name for corpus in weighted])
            builder.problem(path, message, fix)
        chosen.append((builder.part(Reference.parse(source)), position_of.get(named, 0)))
    return chosen, weights
