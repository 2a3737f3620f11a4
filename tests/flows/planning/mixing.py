"""The tiny recipe with three sources and other mixtures, and what is planned of them."""

from __future__ import annotations

from typing import Any

from flows.planning.mixtures import corpora, shares
from flows.planning.plan import Plan
from specs.stages.training import Segment
from tests.recipes import RECIPE

BASE = (
    RECIPE.replace(
        "sources:\n",
        'sources:\n  pages: {{url: "{documents}", format: text, include: ["note-0*.txt"]}}\n'
        '  sums: {{url: "{documents}", format: text, include: ["note-1*.txt"]}}\n',
        1,
    )
    .replace("sources: {{notes: {{holdout: 0.2}}}}", "sources: {{notes: {{}}, pages: {{}}, sums: {{}}}}")
    .replace(
        "  second: {{kind: mixture, weights: {{corpus/notes: 1}}, max_repetition: 100, seed: 29}}\n",
        "{second}",
    )
    .replace("  main: {{kind: mixture, weights: {{corpus/notes: 1}}, max_repetition: 100}}\n", "{main}")
)
MAIN = "  main: {kind: mixture, weights: {corpus/notes: 3, corpus/pages: 2}, max_repetition: 100}\n"
SECOND = "  second: {kind: mixture, weights: {main: 70, corpus/sums: 30}, max_repetition: 100}\n"
TOKENS = {"corpus/notes": 40_000, "corpus/pages": 40_000, "corpus/sums": 40_000}


def shares_of(plan: Plan, name: str) -> dict[str, float]:
    names = {read.fingerprint: read.name for read in corpora(plan.graph, name)}
    found = shares(plan.graph, name, lambda node: TOKENS[node.name])
    return {names[fingerprint]: float(share) for fingerprint, share in found.items()}


def segments_of(plan: Plan) -> dict[str, Any]:
    return {name: node.part for name, node in plan.graph.nodes.items() if isinstance(node.part, Segment)}


def excluded_by(plan: Plan, name: str) -> dict[str, int]:
    node = plan.graph.nodes[name]
    return {
        node.inputs[f"excluded:{index}"].name: samples for index, samples in enumerate(node.part.excluded)
    }  # type: ignore[attr-defined]
