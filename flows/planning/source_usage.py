"""Counts the use of the sources by training: tokens, passes and limits per stage and source.

A pass is a use of every training sequence of a source. Passes are counted from new weights to the end of a
stage, through all mixtures and in all lengths; the mixture that the stage draws from limits them.

Invariant: a built corpus is counted exactly. The tokens of a corpus that is not built are bounded by its
files: each token has at least one byte, and each file can add a token for the beginning and one for the end
of a document; a plan that is refused by this bound is impossible in any case. A corpus whose source is
declared and unavailable is counted as declared.
"""

import math
from dataclasses import asdict, dataclass
from typing import Any, cast

from flows.planning.graph import Graph, Node
from flows.planning.mixtures import corpora, learned_in, limits, shares
from flows.planning.parts.consumed_samples import ancestry_of
from infra.store import Artifact, Store
from infra.store.inputs import Listing
from specs.errors import Problem
from specs.pipeline import Pipeline
from specs.stages.corpus import CorpusPart
from specs.stages.training import Segment

COMPRESSION = 20  # generous bound on the bytes of text that a byte of a compressed file holds
COMPRESSED = (".gz", ".bz2", ".xz", ".zst", ".parquet", ".arrow")


@dataclass(frozen=True)
class SourceUsage:
    """The use of one source by a training stage."""

    stage: str
    mixture: str
    source: str
    tokens: float  # that the stage draws
    consumed: float  # tokens from new weights to the end of the stage
    passes: float  # over the source, from new weights to the end of the stage
    allowed: float  # in passes
    available: int  # training tokens of the source
    exact: bool  # whether `available` is exact; false for an upper bound, before the corpus is built
    declared: bool  # whether `available` comes from the declaration of an unavailable source
    sequences: int  # windows or rows of the available tokens
    sequence_length: int
    shortfall: float  # tokens that the source lacks under the limit

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def usages(graph: Graph, pipeline: Pipeline, store: Store) -> list[SourceUsage]:
    """The usage of each source by each training stage, at the segment of the stage with the highest use."""
    sources = _Sources(graph, store)
    highest: dict[tuple[str, str], SourceUsage] = {}
    for node in graph.nodes.values():
        if node.segment is None or "mixture" not in node.inputs:
            continue
        mixture = graph.nodes[node.inputs["mixture"].name]
        allowed = limits(graph, pipeline, mixture.stage)
        furthest: dict[str, tuple[Node, int]] = {}  # merged checkpoints may have ancestors in common
        for segment, step in ancestry_of(graph, node, node.end_step or 0):
            if "mixture" in segment.inputs and step >= furthest.get(segment.name, (segment, 0))[1]:
                furthest[segment.name] = segment, step
        for corpus in corpora(graph, mixture.name):
            tokens = consumed = passes = 0.0
            for segment, step in furthest.values():
                drawn = sources.drawn(segment, step, corpus.fingerprint)
                in_tokens = drawn * cast(Segment, segment.part).sequence_length
                consumed += in_tokens
                tokens += in_tokens if segment.stage == node.stage else 0.0
                if drawn:
                    in_all = sources.sequences(segment, corpus.fingerprint)
                    passes += drawn / in_all if in_all else math.inf
            available_tokens, exact = sources.available(graph.nodes[corpus.name])
            limit = allowed[corpus.fingerprint]
            lacking = max(0.0, passes / limit - 1) * available_tokens if available_tokens else tokens
            usage = SourceUsage(
                stage=node.stage,
                mixture=mixture.name,
                source=corpus.name,
                tokens=tokens,
                consumed=consumed,
                passes=passes,
                allowed=limit,
                available=available_tokens,
                exact=exact,
                declared=corpus_is_declared(graph, graph.nodes[corpus.name]),
                sequences=sources.sequences(node, corpus.fingerprint),
                sequence_length=node.segment.sequence_length,
                shortfall=lacking if passes > limit else 0.0,
            )
            before = highest.get((node.stage, corpus.name))
            if before is None or usage.passes / limit >= before.passes / before.allowed:
                highest[node.stage, corpus.name] = usage
    return list(highest.values())


def problems(uses: list[SourceUsage]) -> list[Problem]:
    """A problem for each use beyond its limit, with what to change."""
    refused = []
    for usage in uses:
        if usage.passes <= usage.allowed:
            continue
        known = "holds" if usage.exact else "is declared with" if usage.declared else "can hold at most"
        message = (
            f"'{usage.stage}' draws {usage.tokens:,.0f} tokens from '{usage.source}' through mixture"
            f" '{usage.mixture}', which {known} {usage.available:,} training tokens ({usage.sequences:,}"
            f" sequences of {usage.sequence_length})"
        )
        fix = "lower the budget or the source's weight, add data"
        if math.isfinite(passes := usage.passes):
            message += f": with what was drawn before {passes:.1f} passes, {usage.allowed:g} are allowed"
            least = int(passes * 10 + 1) / 10
            fix += f" ({passes / usage.allowed:.2f} times as much), or raise max_repetition to {least:g}."
        else:
            fix += ", or shorten the sequences."
        refused.append(Problem(("stages", usage.stage, "budget"), message, fix))
    return refused


class _Sources:
    """Sizes of corpora and shares of mixtures, cached."""

    def __init__(self, graph: Graph, store: Store) -> None:
        self._graph = graph
        self._store = store
        self._available: dict[str, tuple[int, bool]] = {}
        self._shares: dict[str, dict[str, Any]] = {}

    def available(self, node: Node) -> tuple[int, bool]:
        """Training tokens of a corpus, and whether the number is exact."""
        if node.fingerprint not in self._available:
            self._available[node.fingerprint] = available(self._graph, self._store, node)
        return self._available[node.fingerprint]

    def sequences(self, segment: Node, corpus: str) -> int:
        """The number of training sequences of a corpus in the form that a segment draws; a lower bound before
        best-fit packing is done."""
        part = cast(Segment, segment.part)
        for role, input_ in segment.inputs.items():
            rows = self._graph.nodes[input_.node or ""]
            if role.startswith("packed:") and rows.inputs["corpus"].fingerprint == corpus:
                artifact = Artifact(self._store, rows.path)
                if artifact.complete:
                    return int(artifact.metric("rows"))
        node = next(
            self._graph.nodes[input_.name]
            for input_ in corpora(self._graph, segment.inputs["mixture"].name)
            if input_.fingerprint == corpus
        )
        return max(0, (self.available(node)[0] - 1) // part.sequence_length)

    def drawn(self, segment: Node, step: int, corpus: str) -> float:
        """The number of sequences of a corpus that a segment has drawn by a step."""
        mixture, part = segment.inputs["mixture"].name, cast(Segment, segment.part)
        if mixture not in self._shares:
            self._shares[mixture] = shares(
                self._graph, mixture, lambda node: self.available(node)[0], learned_in(self._store)
            )
        samples = part.sample_at(step) - part.sample_offset
        return float(samples * self._shares[mixture].get(corpus, 0))


def corpus_is_declared(graph: Graph, node: Node) -> bool:
    """Whether the documents of a part of a corpus are declared and unavailable."""
    return node.inputs["documents"].name in graph.unavailable


def available(graph: Graph, store: Store, node: Node) -> tuple[int, bool]:
    """Training tokens of a part of a corpus, and whether the number is exact."""
    process = cast(CorpusPart, node.part).process
    if corpus_is_declared(graph, node):
        size = graph.unavailable[node.inputs["documents"].name].size
        assert size is not None and size.tokens is not None, "checked with the recipe"
        return int(size.tokens.amount * (1 - process.holdout)), False
    artifact = Artifact(store, node.path)
    if artifact.complete:
        return int(artifact.metric("train", "tokens")), True
    repeats = process.repeats
    repeated = repeats.per_bucket * repeats.length * sum(repeats.buckets) if repeats else 0
    listing = graph.listings[node.inputs["documents"].name]
    return _most_tokens(listing) + 2 * len(listing.files) + repeated + _planted(graph, node), False


def _most_tokens(listing: Listing) -> int:
    """The most tokens that files can hold: their bytes of text, since a token has at least one."""
    factor = COMPRESSION if any(file.path.endswith(COMPRESSED) for file in listing.files) else 1
    return factor * listing.bytes


def _planted(graph: Graph, node: Node) -> int:
    """The most tokens of the planted copies; texts count as one byte long, and all in the largest bucket."""
    part, most = cast(CorpusPart, node.part), 0
    for name, planted in part.process.planted.items():
        if planted.canaries is not None:
            most += planted.canaries.count * (planted.canaries.longest + 2) * max(planted.buckets)
        elif (listing := graph.listings.get(node.inputs[f"planted:{name}"].name)) is not None:
            most += 3 * _most_tokens(listing) * max(planted.buckets)
    return most
