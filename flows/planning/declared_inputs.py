"""Inputs that a recipe declares and that are unavailable: how a plan says so.

Invariants:
- An unavailable input has a provisional digest, made of where it would lie, and every part that depends on it a provisional fingerprint:
  nothing is ever stored under one, or looked for in the store.
- A declaration never stands in for files that are there. It is compared with them.
"""

from __future__ import annotations

from collections.abc import Callable

from flows.planning.graph import Graph, Node
from infra.store import Artifact, Store
from specs.stages.corpus import CorpusPart

TOLERANCE = 0.05
"""Relative difference between a declared and a real size that a plan mentions."""
NAMED = 6
"""Of what is unavailable, how much the note names; the plan's rows (`--details`) and its JSON (`declared`) have all."""


def own(graph: Graph, node: Node) -> list[str]:
    """What a part reads itself that is unavailable."""
    return [read.name for read in node.inputs.values() if read.node is None and read.name in graph.unavailable]


def reason(graph: Graph, node: Node) -> str:
    """Why the state of a part that depends on something unavailable is not known."""
    names = own(graph, node)
    return f"unavailable: {', '.join(names)}" if names else "depends on unavailable inputs"


def notes(graph: Graph, store: Store, available: Callable[[Graph, Store, Node], tuple[int, bool]]) -> list[str]:
    """One line on what is unavailable, and one for each source whose declared size is off by more than `TOLERANCE`.
    `available`: training tokens of a part of a corpus, and whether the number is exact or a bound."""
    waiting = graph.waits_for()
    found = []
    if graph.unavailable:
        duplicates = graph.duplicates()
        count = sum(bool(unavailable) and name not in duplicates for name, unavailable in waiting.items())
        names = list(graph.unavailable)
        more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
        found.append(
            f"declared, unavailable: {', '.join(names[:NAMED])}{more}; the fingerprints of {count} parts are provisional, and running them "
            "needs the data"
        )
    for node in graph.nodes.values():
        part = node.part
        if not isinstance(part, CorpusPart) or part.source.declared is None or waiting[node.name]:
            continue
        declared, artifact = part.source.declared, Artifact(store, node.path)
        name = node.inputs["documents"].name
        if not artifact.complete:
            bound, _ = available(graph, store, node)
            if declared.tokens is not None and bound < declared.tokens.amount:
                found.append(f"source {name} declares {declared.tokens.amount:,} tokens; its files can hold {bound:,} at most")
        else:
            metrics = artifact.manifest.metrics
            sizes = {"tokens": declared.tokens.amount if declared.tokens else None, "documents": declared.documents}
            for what, stated in sizes.items():
                if stated is not None and abs(metrics.get(what, stated) - stated) > TOLERANCE * stated:
                    found.append(
                        f"source {name} declares {stated:,} {what}; '{node.name}' has {metrics[what]:,} ({metrics[what] / stated:.2f})"
                    )
    return found
