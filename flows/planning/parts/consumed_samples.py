"""Samples that the ancestors of a segment have drawn from mixtures: counters that continue, and exclusions.

A training segment draws samples [offset, end) of its mixture. The windows of a corpus have the same order in
all mixtures with the same seed, sequence length and packing, so the windows that several mixtures have drawn
are a prefix of that order, as long as each mixture began after the others. Samples are excluded by beginning
after them: a segment states for every mixture how many samples were drawn, and
`apertus_model.data.order.samples.drawn_before` counts them for each corpus.

Invariant: samples of an excluded stage are drawn again only after the rest of their source. Where that is
impossible (another order, another length) it is a problem of the recipe, never a silent approximation.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple, cast

from flows.planning.graph import Graph, Input, Node
from flows.planning.mixtures import corpora
from flows.planning.parts.builder import Builder
from specs.dependencies import excluded_by
from specs.errors import FieldPath
from specs.stages.mixture import MixturePart
from specs.stages.training import Segment
from specs.trajectory import SegmentPlan

# training segments, each with the step up to which it counts, the last one first
Ancestry = list[tuple[Node, int]]
Counters = dict[tuple[str, ...], int]  # samples, by `counter`
DATA = ("mixture", "conversations", "pairs", "log_probabilities", "distinct_prompts")


class ConsumedSamples(NamedTuple):
    """The first `samples` of a mixture in sequences of one length and packing."""

    mixture: Input
    length: int
    packing: str
    samples: int


@dataclass
class Drawn:
    """What was drawn before a segment begins."""

    samples: Counters = field(default_factory=dict)  # at which counters continue
    ancestry: Ancestry = field(default_factory=list)  # the segments before this one
    carried: Ancestry = field(default_factory=list)  # those of them whose counters continue

    @classmethod
    def before(cls, graph: Graph, parent: Node, step: int, *, carried: bool) -> Drawn:
        """What was drawn up to a step of a part, from which a phase starts; `carried`: whether its counters
        continue."""
        ancestry = ancestry_of(graph, parent, step)
        return cls(consumed_until(graph, parent, step), ancestry, ancestry) if carried else cls({}, ancestry)

    def add(self, node: Node, key: tuple[str, ...], planned: SegmentPlan) -> None:
        self.samples[key] = self.samples.get(key, 0) + planned.end_sample - planned.start_sample
        self.ancestry = [(node, planned.end_step), *self.ancestry]
        self.carried = [(node, planned.end_step), *self.carried]


def counter(inputs: dict[str, Input], length: int, packing: str) -> tuple[str, ...]:
    """The key of a segment's counter: its data, and how they become sequences."""
    data = [input_.fingerprint for role, input_ in inputs.items() if role.split(":")[0] in DATA]
    return (*data, str(length), packing)


def ancestry_of(graph: Graph, node: Node | None, step: int) -> Ancestry:
    """The segments that lead to a step of a part; for a merge or an open selection, those of all its
    checkpoints."""
    ancestry: Ancestry = []
    while node is not None and not node.imported:
        if node.part.OF_CHECKPOINTS:
            for input_ in node.inputs.values():
                if input_.step is not None and input_.node is not None:
                    ancestry += ancestry_of(graph, graph.nodes[input_.node], input_.step)
            break
        ancestry.append((node, step))
        node, step = graph.parent(node)
    return ancestry


def consumed_until(graph: Graph, node: Node, step: int) -> Counters:
    """The number of samples drawn up to a step of a part, by the counters of the segments."""
    consumed: Counters = {}
    current: Node | None = node
    while current is not None and not current.imported:
        if current.part.OF_CHECKPOINTS:
            merged: Counters = {}
            for input_ in current.inputs.values():
                if input_.step is not None and input_.node is not None:
                    for key, samples in consumed_until(graph, graph.nodes[input_.node], input_.step).items():
                        merged[key] = max(merged.get(key, 0), samples)
            return merged | consumed  # later segments have their own counters
        segment = cast(Segment, current.part)
        key = counter(current.inputs, segment.sequence_length, segment.packing)
        consumed.setdefault(key, segment.sample_at(step))
        current, step = graph.parent(current)
    return consumed


def excluded(
    builder: Builder,
    at: FieldPath,
    mixture: Input,
    length: int,
    packing: str,
    drawn: Drawn,
) -> dict[str, ConsumedSamples]:
    """The samples after which a segment begins, by fingerprint of the mixture; its own mixture is included if
    samples were drawn from it.

    Of an excluded stage, the steps in the ancestry of the segment count, or all steps if the stage is not an
    ancestor. The pieces of an annealed mixture exclude each other. `at`: the path of the phase, for
    problems."""
    graph = builder.graph
    node = graph.nodes[mixture.node or ""]
    segments: Ancestry = []
    for name in excluded_by(builder.pipeline, node.stage):
        ancestors = [(segment, step) for segment, step in drawn.ancestry if segment.stage == name]
        all_steps = [(segment, segment.end_step or 0) for segment in graph.of(name)] if name != at[1] else []
        segments += ancestors or all_steps
    if builder.pipeline.stages[node.stage].annealed:
        segments += [
            (segment, step) for segment, step in drawn.carried if _stage_of(graph, segment) == node.stage
        ]
    before_segment: dict[str, ConsumedSamples] = {}
    mine = {corpus.fingerprint for corpus in corpora(graph, node.name)}
    for segment, step in segments:
        for consumed in _consumed_in(segment, step):
            other = graph.nodes[consumed.mixture.node or ""]
            shared = [corpus.name for corpus in corpora(graph, other.name) if corpus.fingerprint in mine]
            if not shared:
                continue
            what = f"samples of '{segment.stage}' from '{shared[0]}'"
            if (consumed.length, consumed.packing) != (length, packing):
                lengths = f"{consumed.length} ({consumed.packing}); here sequences have {length}"
                message = f"mixture '{node.stage}' excludes {what} in sequences of {lengths}"
                fix = "use the same sequence_length and packing, or take the stage out of exclude."
                builder.problem((*at, "mixture"), f"{message} ({packing})", fix)
            elif _seed(other) != _seed(node):
                message = (
                    f"mixture '{node.stage}' has seed {_seed(node)} and excludes {what} through"
                    f" '{other.stage}' of seed {_seed(other)}"
                )
                fix = f"use seed: {_seed(other)} here too; the order of a source's windows depends on it."
                builder.problem(("stages", node.stage, "seed"), f"{message}, in another order", fix)
            else:
                before = before_segment.get(consumed.mixture.fingerprint, consumed)
                most = max(consumed, before, key=lambda samples_of: samples_of.samples)
                before_segment[consumed.mixture.fingerprint] = most
    return before_segment


def _consumed_in(node: Node, step: int) -> list[ConsumedSamples]:
    """The samples drawn up to a step of a segment: through its own mixture, and before the segment began."""
    part = node.segment
    if part is None or "mixture" not in node.inputs:
        return []
    before = [node.inputs[f"excluded:{index}"] for index in range(len(part.excluded))]
    pairs = [(node.inputs["mixture"], part.sample_at(step)), *zip(before, part.excluded, strict=True)]
    return [ConsumedSamples(input_, part.sequence_length, part.packing, samples) for input_, samples in pairs]


def _stage_of(graph: Graph, segment: Node) -> str:
    mixture = segment.inputs.get("mixture")
    return graph.nodes[mixture.node].stage if mixture is not None and mixture.node is not None else ""


def _seed(node: Node) -> int:
    return cast(MixturePart, node.part).seed
