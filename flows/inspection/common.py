"""The code that all inspectors share: the options, and access to the artifacts that a part reads."""

from __future__ import annotations

from dataclasses import dataclass

from flows.planning.graph import Input, Node
from flows.planning.plan import Plan
from infra.store import Artifact
from specs.errors import SpecError
from specs.job import InputRef


@dataclass(frozen=True)
class Options:
    """The options of an inspector. `step`: of training, from 1; `sample`: index in the training data, from
    0, in place of a step; `limit`: number of samples or examples to show; `samples`: number of samples over
    which the shares of a mixture are counted; `reason`: the only reason for which a corpus's examples are
    shown; `document`: the id, URL or hash of the only document to look for."""

    step: int | None = None
    sample: int | None = None
    limit: int = 2
    samples: int = 100_000
    reason: str | None = None
    document: str | None = None


def artifact(plan: Plan, node: Node) -> Artifact:
    """The finished artifact of a part. SpecError when it has not been made."""
    found = node.artifact(plan.store)
    if not found.complete:
        fix = f"apertus run ... --until {node.stage}"
        raise SpecError.of(
            (), f"'{node.name}' has not been made yet, so there is nothing to look at", fix, "inspect"
        )
    return found


def references(plan: Plan, node: Node) -> dict[str, InputRef]:
    """The inputs of a part by role, without checkpoints. SpecError when one of them, or a part that a
    mixture among them reads, has not been made."""
    found: dict[str, InputRef] = {}
    for role, read in node.inputs.items():
        if read.step is None and read.node is not None:
            _made(plan, read)
            path = plan.graph.nodes[read.node].path
            found[role] = InputRef(kind=read.kind, fingerprint=read.fingerprint, name=read.name, path=path)
    return found


def _made(plan: Plan, read: Input) -> None:
    node = plan.graph.nodes[read.node or ""]
    artifact(plan, node)
    for inner in node.inputs.values() if node.kind == "mixture" else ():
        _made(plan, inner)
