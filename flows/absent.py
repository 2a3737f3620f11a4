"""Inputs that a recipe declares and that are unavailable: how a plan says so, and why a run refuses.

Invariants:
- What is absent has a provisional digest, made of where it would lie. So do the fingerprints of all parts that depend on it: nothing is
  ever stored under them, and nothing is looked for in the store.
- A declaration never stands in for files that are there. It is compared with them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from infra.store import Artifact, Store
from specs.base import canonical_json
from specs.errors import FieldPath, Problem, SpecError
from specs.sources import Declared, SourceSpec, resolve_url
from specs.stages.corpus import CorpusPart

if TYPE_CHECKING:
    from flows.graph import Graph, Node
    from flows.plan import Plan

TOLERANCE = 0.05
"""Relative difference between a declared and a real size that a plan mentions."""
NAMED = 6
"""Of what is absent, how much the note names; the plan's rows (`--details`) and its JSON (`declared`) have all."""


@dataclass(frozen=True)
class Absent:
    """Something outside the store that is unavailable. `path`: where the recipe states its url; `size`: of a source, as declared."""

    url: str
    reason: str
    path: FieldPath
    size: Declared | None = None

    def to_json(self) -> dict[str, Any]:
        tokens = self.size.tokens.amount if self.size and self.size.tokens else None
        return {"url": self.url, "reason": self.reason, "tokens": tokens, "documents": self.size.documents if self.size else None}


def provisional(source: SourceSpec) -> str:
    """What stands for the digest of files that nobody has seen: the same for the same place and globs."""
    place = canonical_json([source.url, source.include, source.exclude])
    return f"declared:{hashlib.sha256(place.encode()).hexdigest()[:23]}"


def is_local(url: str) -> bool:
    """Whether listing a url asks no network."""
    resolved = resolve_url(url)
    return "://" not in resolved or resolved.startswith("file://")


def refuse(plan: Plan, stages: set[str]) -> None:
    """SpecError, naming each source and its url, when unfinished parts of these stages read unavailable inputs."""
    wanted: dict[str, list[str]] = {}
    for step in plan.steps.values():
        if step.node.stage in stages and step.action != "reuse":
            for name in step.absent:
                wanted.setdefault(name, []).append(step.node.stage)
    problems = []
    for name, readers in wanted.items():
        absent = plan.graph.absent[name]
        first, *others = dict.fromkeys(readers)
        message = f"'{name}' is declared and unavailable ({absent.reason}); '{first}'{' and what follows it' if others else ''} cannot run"
        problems.append(Problem(absent.path, message, f"put the data at {absent.url}, or state where they are."))
    if problems:
        raise plan.pipeline.located(SpecError(problems))


def own(graph: Graph, node: Node) -> list[str]:
    """What a part reads itself that is unavailable."""
    return [read.name for read in node.inputs.values() if read.node is None and read.name in graph.absent]


def reason(graph: Graph, node: Node) -> str:
    """Why the state of a part that depends on something absent is not known."""
    names = own(graph, node)
    return f"unavailable: {', '.join(names)}" if names else "depends on unavailable inputs"


def notes(plan: Plan, available: Callable[[Graph, Store, Node], tuple[int, bool]]) -> list[str]:
    """One line on what is absent, and one for each source whose declared size is off by more than `TOLERANCE`. `available`: training tokens
    of a part of a corpus, and whether the number is exact or a bound."""
    found = []
    if plan.graph.absent:
        twins = plan.graph.twins()
        count = sum(bool(step.absent) and name not in twins for name, step in plan.steps.items())
        names = list(plan.graph.absent)
        more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
        found.append(
            f"declared, unavailable: {', '.join(names[:NAMED])}{more}; the fingerprints of {count} parts are provisional, and running them "
            "needs the data"
        )
    for node in plan.graph.nodes.values():
        part = node.part
        if not isinstance(part, CorpusPart) or part.source.declared is None or plan.steps[node.name].absent:
            continue
        declared, artifact = part.source.declared, Artifact(plan.store, node.path)
        name = node.inputs["documents"].name
        if not artifact.complete:
            bound, _ = available(plan.graph, plan.store, node)
            if declared.tokens is not None and bound < declared.tokens.amount:
                found.append(f"source {name} declares {declared.tokens.amount:,} tokens; its files can hold {bound:,} at most")
        else:
            metrics = artifact.manifest["metrics"]
            sizes = {"tokens": declared.tokens.amount if declared.tokens else None, "documents": declared.documents}
            for what, stated in sizes.items():
                if stated is not None and abs(metrics.get(what, stated) - stated) > TOLERANCE * stated:
                    found.append(
                        f"source {name} declares {stated:,} {what}; '{node.name}' has {metrics[what]:,} ({metrics[what] / stated:.2f})"
                    )
    return found
