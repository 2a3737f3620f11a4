"""Reports the unavailable declared inputs of a plan.

Invariants:
- An unavailable input has a provisional digest, computed from its url and globs, and every part that depends
  on it has a provisional fingerprint, under which nothing is stored or looked up.
- A declaration never replaces files that exist. It is compared with them.
"""

from typing import cast

from flows.planning.graph import Graph, Node
from flows.planning.source_usage import available
from infra.store import Artifact, Store
from specs.errors import counted, some_of
from specs.stages.corpus import CorpusPart

TOLERANCE = 0.05
"""The relative difference between a declared and an actual size above which a plan mentions it."""


def own(graph: Graph, node: Node) -> list[str]:
    """The unavailable inputs that a part reads directly."""
    return [
        input_.name
        for input_ in node.inputs.values()
        if input_.node is None and input_.name in graph.unavailable
    ]


def reason(graph: Graph, node: Node) -> str:
    """The reason why the state of a part that depends on an unavailable input is unknown."""
    names = own(graph, node)
    return f"unavailable: {', '.join(names)}" if names else "depends on unavailable inputs"


def notes(graph: Graph, store: Store) -> list[str]:
    """One line on the unavailable inputs, and one for each source whose declared size is off by more than
    `TOLERANCE`."""
    waiting = graph.waits_for()
    texts = []
    if graph.unavailable:
        duplicates = graph.duplicates
        count = sum(bool(unavailable) and name not in duplicates for name, unavailable in waiting.items())
        texts.append(
            f"unavailable: {some_of(graph.unavailable)}; the fingerprints of"
            f" {counted(count, 'part')} are provisional, and running them needs these inputs"
        )
    for node in graph.nodes.values():
        declared = cast(CorpusPart, node.part).source.declared if node.kind == "corpus" else None
        if declared is None or waiting[node.name]:
            continue
        artifact = Artifact(store, node.path)
        name = node.inputs["documents"].name
        if not artifact.complete:
            bound, _ = available(graph, store, node)
            if declared.tokens is not None and bound < declared.tokens.amount:
                begin = f"source {name} declares {declared.tokens.amount:,} tokens"
                texts.append(f"{begin}; its files can hold {bound:,} at most")
        else:
            metrics = artifact.manifest.metrics
            tokens = declared.tokens.amount if declared.tokens else None
            for what, number in (("tokens", tokens), ("documents", declared.documents)):
                if number is not None and abs(metrics.get(what, number) - number) > TOLERANCE * number:
                    measured = f"'{node.name}' has {metrics[what]:,} ({metrics[what] / number:.2f})"
                    texts.append(f"source {name} declares {number:,} {what}; {measured}")
    return texts
