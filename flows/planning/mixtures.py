"""The corpora of a mixture, their shares and allowed repetition, for the planner.

Invariant: a pure function of the graph and of the given sizes; the corpora are in the order of their
fingerprints, as in the mixture's recipe (`apertus_model/stages/mixture.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from fractions import Fraction

from flows.planning.graph import Graph, Input, Node
from specs.pipeline import Pipeline
from specs.stages.base import Weight
from specs.stages.mixture import MixturePart, MixtureStage
from specs.units import Reference

Tokens = Callable[[Node], int]  # training tokens of a corpus, or a bound


def corpora(graph: Graph, name: str) -> list[Input]:
    """The corpora of a mixture, each once."""
    found: dict[str, Input] = {}
    for read in graph.nodes[name].inputs.values():
        for corpus in corpora(graph, read.node or "") if read.kind == "mixture" else [read]:
            found.setdefault(corpus.fingerprint, corpus)
    return [found[fingerprint] for fingerprint in sorted(found)]


def shares(graph: Graph, name: str, tokens: Tokens) -> dict[str, Fraction]:
    """Share of each corpus, by fingerprint, in the samples of a mixture. `tokens` is called only under
    `proportional`."""
    node = graph.nodes[name]
    assert isinstance(node.part, MixturePart)
    found: dict[str, Fraction] = {}
    for read, weight in zip(node.inputs.values(), node.part.weights, strict=True):
        inner = (
            shares(graph, read.node or "", tokens)
            if read.kind == "mixture"
            else {read.fingerprint: Fraction(1)}
        )
        size = tokens(graph.nodes[read.node or ""]) if node.part.proportional else 1
        for fingerprint, share in inner.items():
            found[fingerprint] = found.get(fingerprint, Fraction(0)) + weight * size * share
    total = sum(found.values())
    return {fingerprint: share / total for fingerprint, share in found.items()} if total else found


def by_size(graph: Graph, name: str) -> bool:
    """Whether the shares of a mixture depend on the sizes of its corpora."""
    node = graph.nodes[name]
    assert isinstance(node.part, MixturePart)
    return node.part.proportional or any(
        by_size(graph, read.node or "") for read in node.inputs.values() if read.kind == "mixture"
    )


def limits(graph: Graph, pipeline: Pipeline, stage_name: str) -> dict[str, float]:
    """Passes over each corpus, by fingerprint, that a mixture allows: the `max_repetition` of the outermost
    weight that states one, else of the mixture that names the corpus; the least of them for a corpus on
    several paths."""
    found: dict[str, float] = {}
    for corpus, limit in _limits(graph, pipeline, stage_name, None):
        found[corpus] = min(limit, found.get(corpus, limit))
    return found


def _limits(
    graph: Graph, pipeline: Pipeline, stage_name: str, stated: float | None
) -> Iterator[tuple[str, float]]:
    stage = pipeline.stages[stage_name]
    assert isinstance(stage, MixtureStage)
    named: list[tuple[str, Weight]] = [
        *stage.sources.items(),
        *(stage.anneal.to.items() if stage.anneal else []),
    ]
    for source, weight in named:
        ref = Reference.parse(source)
        limit = stated or weight.max_repetition
        if isinstance(pipeline.stages[ref.stage], MixtureStage):
            yield from _limits(graph, pipeline, ref.stage, limit)
        else:
            parts = graph.of(ref.stage)
            corpus = next(
                (part for part in parts if ref.part is not None and part.name == f"{ref.stage}/{ref.part}"),
                parts[-1],
            )
            yield corpus.fingerprint, limit or stage.max_repetition
