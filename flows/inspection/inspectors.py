"""`apertus inspect SPEC NAME`: shows the content of an artifact; one inspector per kind of part.

Invariants: an inspector reads the store and changes nothing; it collects one JSON document, and prints that
document. Torch is not imported. A part that has not been made yet is an error that says how to make it.

To add one: `INSPECTORS[kind] = Inspector(collect, show)`.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from rich.console import Console

from flows.inspection import batch, corpus, mixture, rows
from flows.inspection.common import Options
from flows.planning.graph import Node
from flows.planning.plan import Plan
from specs.errors import SpecError, a
from specs.stages import TRAINING


class Inspector(NamedTuple):
    """The functions that inspect one kind of part."""

    collect: Callable[[Plan, Node, Options], Any]  # reads what is to be shown, as one JSON document
    show: Callable[[Console, Any], None]  # prints it


INSPECTORS: dict[str, Inspector] = {
    "corpus": Inspector(corpus.collect, corpus.show),
    "mixture": Inspector(mixture.collect, mixture.show),
    **dict.fromkeys(rows.KINDS, Inspector(rows.collect, rows.show)),
    **dict.fromkeys(TRAINING, Inspector(batch.collect, batch.show)),
}
DOCUMENT = Inspector(corpus.collect_documents, corpus.show_documents)
"""The inspector of a corpus with --document."""


def inspector_of(plan: Plan, name: str, options: Options) -> tuple[Inspector, Node]:
    """The inspector for a stage, or for one part of it, and the part that it inspects. SpecError when the
    kind of part has no inspector, and for an option that belongs to another kind."""
    parts = plan.named(name, "inspect")
    chosen = [node for node in parts if node.kind in INSPECTORS]
    if not chosen:
        kind = parts[0].kind if name == parts[0].name else plan.pipeline.stages[name].kind
        problem = f"there is nothing to inspect in {a(kind)}"
        raise SpecError.of((), problem, f"name one of: {', '.join(INSPECTORS)}.", "inspect")
    kind, trains = chosen[0].kind, chosen[0].end_step is not None
    if options.step is not None and options.sample is not None:
        problem = "--step shows the samples of a step, --sample one by its index"
        raise SpecError.of((), problem, "give one of the two.", "inspect")
    refused = {  # options that are about other kinds
        "--step": ("a training stage", not trains, options.step),
        "--sample": ("a training stage", not trains and kind not in rows.KINDS, options.sample),
        "--reason": ("a corpus", kind != "corpus", options.reason),
        "--document": ("a corpus", kind != "corpus", options.document),
    }
    for option, (wanted, refuses, value) in refused.items():
        if refuses and value is not None:
            problem = f"{option} applies to {wanted}; '{name}' is {a(kind)}"
            raise SpecError.of((), problem, "leave it out.", "inspect")
    if trains:
        return INSPECTORS[kind], batch.segment_at(name, chosen, options)
    if len(chosen) > 1:
        names = ", ".join(node.name for node in chosen)
        raise SpecError.of((), f"'{name}' has {len(chosen)} parts", f"name one: {names}.", "inspect")
    return INSPECTORS[kind] if options.document is None else DOCUMENT, chosen[0]
