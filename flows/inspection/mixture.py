"""Shows what a mixture draws: asked and realised shares, with the bound on their difference."""

from typing import TypedDict, cast

from rich.console import Console
from rich.markup import escape

from apertus_model.data.order.mixture_recipe import FILE, MixtureRecipe
from flows.inspection.common import Options
from flows.planning.graph import Node
from flows.planning.mixtures import corpora
from flows.planning.plan import Plan
from flows.stored_part import finished
from flows.terminal import empty_table
from specs.errors import counted


class SourceUse(TypedDict):
    """The use of a source by a stage that trains on the mixture, up to the end of the stage."""

    stage: str
    sequences: int
    sequence_length: int
    tokens: float
    passes: float  # over the source, counted from new weights
    allowed: float


class Source(TypedDict):
    source: str
    weight: int  # as the mixture stores it, relative to the others
    share: float
    drawn: int  # samples of the source among the first samples of the mixture
    realised: float  # share of the source in these first samples
    off_by: float  # `drawn`, less the asked share of the first samples, in samples
    bound: float  # on the size of `off_by`, in samples, for any number of samples
    tokens: int
    documents: int
    uses: list[SourceUse]


class MixtureInspection(TypedDict):
    """The output of `apertus inspect` for a mixture."""

    name: str
    kind: str
    seed: int
    samples: int  # number of first samples that are counted
    block: int
    sources: list[Source]
    first: list[str]  # sources of the first samples


def collect(plan: Plan, node: Node, options: Options) -> MixtureInspection:
    """The sources, and what the first samples draw from them. SpecError if the mixture has not been made."""
    from apertus_model.data.order.mixture import BLOCK, MixtureOrder

    recipe = finished(plan, node).document(FILE, MixtureRecipe)
    names = {corpus.fingerprint: corpus.name for corpus in corpora(plan.graph, node.name)}
    entries = recipe.sources
    order = MixtureOrder(recipe.weights, [1] * len(entries), recipe.seed)
    drawn = order.drawn(options.samples)
    readers = {
        segment.stage
        for segment in plan.graph.nodes.values()
        if "mixture" in segment.inputs and _stage(plan, segment) == node.stage
    }
    sources: list[Source] = []
    for index, entry in enumerate(entries):
        name = names[entry.fingerprint]
        uses = [
            cast(SourceUse, {fact: getattr(usage, fact) for fact in SourceUse.__annotations__})
            for usage in plan.source_usage
            if usage.source == name and usage.stage in readers
        ]
        sources.append(
            {
                "source": name,
                "weight": entry.weight,
                "share": float(order.shares[index]),
                "drawn": drawn[index],
                "realised": drawn[index] / options.samples,
                "off_by": float(drawn[index] - options.samples * order.shares[index]),
                "bound": float(order.discrepancy(index)),
                "tokens": entry.tokens,
                "documents": entry.documents,
                "uses": uses,
            }
        )
    first = [names[entries[order[i].source].fingerprint] for i in range(options.limit)]
    return {
        "name": node.name,
        "kind": "mixture",
        "seed": recipe.seed,
        "samples": options.samples,
        "block": BLOCK,
        "sources": sources,
        "first": first,
    }


def _stage(plan: Plan, segment: Node) -> str:
    return plan.graph.nodes[segment.inputs["mixture"].name].stage


def show(console: Console, mixture: MixtureInspection) -> None:
    sources, samples = counted(len(mixture["sources"]), "source"), counted(mixture["samples"], "sample")
    title = f"mixture {mixture['name']}, seed {mixture['seed']}: {sources} over the first {samples}"
    numbers = ("weight", "asked", "realised", "off by", "bound", "tokens")
    table = empty_table(title, ("source", *numbers), numbers=numbers)
    passes = ("passes", "allowed")
    uses = empty_table("passes, at the end of a stage", ("source", "stage", *passes), numbers=passes)
    for row in sorted(mixture["sources"], key=lambda row: -row["share"]):
        name, shares = escape(row["source"]), (f"{row['share']:.4%}", f"{row['realised']:.4%}")
        distance = f"{row['off_by']:+.2f}", f"{row['bound']:.1f}"
        table.add_row(name, str(row["weight"]), *shares, *distance, f"{row['tokens']:,}")
        for use in row["uses"]:
            uses.add_row(name, escape(use["stage"]), f"{use['passes']:.2f}", f"{use['allowed']:g}")
    console.print(table)
    console.print("off by, bound: in samples; the bound holds for any number of samples.", style="dim")
    if uses.row_count:
        console.print(uses)
    console.print(f"first samples: {escape(', '.join(mixture['first']))}", soft_wrap=True)
