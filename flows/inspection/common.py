"""The code that all inspectors share: the options, and the inputs that a part reads."""

from dataclasses import dataclass

from flows.planning.graph import Input, Node
from flows.planning.plan import Plan
from flows.stored_part import finished
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


def references(plan: Plan, node: Node) -> dict[str, InputRef]:
    """The inputs of a part by role, without checkpoints. SpecError if one, or its mixture's, is not made."""
    references: dict[str, InputRef] = {}
    for role, input_ in node.inputs.items():
        if input_.step is None and input_.node is not None:
            _made(plan, input_)
            references[role] = InputRef(
                kind=input_.kind, fingerprint=input_.fingerprint, name=input_.name, path=input_.place
            )
    return references


def _made(plan: Plan, input_: Input) -> None:
    node = plan.graph.nodes[input_.node or ""]
    finished(plan, node)
    for inner in node.inputs.values() if node.kind == "mixture" else ():
        _made(plan, inner)
