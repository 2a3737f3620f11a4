"""The corpora of a mixture, their shares and allowed repetition, for the planner.

Invariant: a pure function of the graph and of the given sizes; the corpora are in the order of their
fingerprints, as in the mixture's recipe (`apertus_model/stages/mixture.py`).
"""

from collections.abc import Callable, Iterator
from fractions import Fraction
from typing import cast

from flows.planning.graph import Graph, Input, Node
from infra.store import Store
from specs.pipeline import Pipeline
from specs.stages.base import Weight
from specs.stages.domain_weights import in_parts
from specs.stages.mixture import MixturePart, MixtureStage
from specs.units import Reference

Tokens = Callable[[Node], int]  # training tokens of a corpus, or a bound
LearnedWeights = Callable[[Node], list[int] | None]  # learned by a segment; None until it has finished


def sources(node: Node) -> list[Input]:
    return [source for role, source in node.inputs.items() if role.startswith("source:")]


def learned_in(store: Store) -> LearnedWeights:
    """A function that reads learned weights as whole parts (`specs.stages.domain_weights.in_parts`), None
    before they are known."""

    def weights(node: Node) -> list[int] | None:
        artifact = node.artifact(store)
        return in_parts(artifact.manifest.facts["domain_weights"]["mean"]) if artifact.complete else None

    return weights


def corpora(graph: Graph, name: str) -> list[Input]:
    """The corpora of a mixture, each once."""
    by_fingerprint: dict[str, Input] = {}
    for source in sources(graph.nodes[name]):
        for corpus in corpora(graph, source.node or "") if source.kind == "mixture" else [source]:
            by_fingerprint.setdefault(corpus.fingerprint, corpus)
    return [by_fingerprint[fingerprint] for fingerprint in sorted(by_fingerprint)]


def shares(
    graph: Graph, name: str, tokens: Tokens, learned: LearnedWeights = lambda node: None
) -> dict[str, Fraction]:
    """The share of each corpus, by fingerprint, in the samples of a mixture. `tokens` is called only under
    `proportional`; learned weights that are not known yet count as equal."""
    node, part = graph.nodes[name], _part(graph, name)
    sums: dict[str, Fraction] = {}
    weights = part.weights
    if part.learned and (known := learned(graph.nodes[node.inputs["learned"].name])) is not None:
        weights = [known[position] for position in part.learned]
    for source, weight in zip(sources(node), weights, strict=True):
        inner = {source.fingerprint: Fraction(1)}
        if source.kind == "mixture":
            inner = shares(graph, source.node or "", tokens, learned)
        size = tokens(graph.nodes[source.node or ""]) if part.proportional else 1
        for fingerprint, share in inner.items():
            sums[fingerprint] = sums.get(fingerprint, Fraction(0)) + weight * size * share
    total = sum(sums.values())
    return {fingerprint: share / total for fingerprint, share in sums.items()} if total else sums


def _part(graph: Graph, name: str) -> MixturePart:
    return cast(MixturePart, graph.nodes[name].part)


def by_size(graph: Graph, name: str) -> bool:
    """Whether the shares of a mixture depend on the sizes of its corpora."""
    inner = [source.node or "" for source in sources(graph.nodes[name]) if source.kind == "mixture"]
    return _part(graph, name).proportional or any(by_size(graph, mixture) for mixture in inner)


def is_learned(graph: Graph, name: str) -> bool:
    """Whether the shares of a mixture depend on learned weights."""
    inner = [source.node or "" for source in sources(graph.nodes[name]) if source.kind == "mixture"]
    return bool(_part(graph, name).learned) or any(is_learned(graph, mixture) for mixture in inner)


def limits(graph: Graph, pipeline: Pipeline, stage_name: str) -> dict[str, float]:
    """The passes over each corpus, by fingerprint, that a mixture allows: the `max_repetition` of the
    outermost weight that states one, else that of the mixture that names the corpus; for a corpus on several
    paths, the least of these."""
    least: dict[str, float] = {}
    for corpus, limit in _limits(graph, pipeline, stage_name, None):
        least[corpus] = min(limit, least.get(corpus, limit))
    return least


def _limits(
    graph: Graph, pipeline: Pipeline, stage_name: str, outer: float | None
) -> Iterator[tuple[str, float]]:
    stage = cast(MixtureStage, pipeline.stages[stage_name])
    if stage.learned is not None:
        for corpus in corpora(graph, stage_name):
            yield corpus.fingerprint, outer or stage.max_repetition
    named: list[tuple[str, Weight]] = [
        *stage.sources.items(),
        *(stage.anneal.to.items() if stage.anneal else []),
    ]
    for source, weight in named:
        ref = Reference.parse(source)
        limit = outer or weight.max_repetition
        if pipeline.stages[ref.stage].kind == stage.kind:
            yield from _limits(graph, pipeline, ref.stage, limit)
        else:
            yield graph.part(ref).fingerprint, limit or stage.max_repetition
