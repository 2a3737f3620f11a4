"""Tables of rehearsed parts: memory beside the plan, and the tensors, collectives, waits and operators of the
rank with the largest peak.

Invariant: only units are computed here; every number comes from a rehearsal.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from apertus_model.rehearsal.records import KINDS, Rehearsed
from flows.format import flop
from flows.report.rehearsal_charts import NAMES, RehearsedPart

LONGEST = 12  # operators


@dataclass(frozen=True)
class Table:
    """Rows of a table; numbers begin with the column `numbers`, counted from 0."""

    title: str
    headings: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]
    numbers: int = 1


def by_stage(parts: Sequence[RehearsedPart]) -> dict[str, list[RehearsedPart]]:
    """The parts by stage, in the order of the recipe."""
    found = defaultdict[str, list[RehearsedPart]](list)
    for part in parts:
        found[part.stage].append(part)
    return dict(found)


def tables(part: RehearsedPart) -> list[Table]:
    """The tables of a part; an empty list if no rank builds."""
    if not part.ranks:
        return []
    rank, found = part.busiest
    return [
        _memory(part),
        _tensors(rank, found),
        _collectives(rank, found),
        _waits(rank, found),
        _operators(rank, found),
    ]


def _gb(size: float) -> str:
    return f"{size / 1e9:,.3g}"


def _memory(part: RehearsedPart) -> Table:
    rows = [
        (
            f"{rank:,}", *(_gb(found.memory.kinds[kind]) for kind in KINDS), _gb(found.memory.total),
            _gb(part.planned[rank]), f"{part.planned[rank] / found.memory.total - 1:+.1%}",
        )
        for rank, found in part.ranks.items()
    ]  # fmt: skip
    kinds = (NAMES.get(kind, kind) for kind in KINDS)
    return Table("GB at the peak of a step", ("rank", *kinds, "total", "plan", "difference"), rows, 0)


def _tensors(rank: int, found: Rehearsed) -> Table:
    rows = [
        (line.operator, " × ".join(map(str, line.shape)), line.dtype, NAMES.get(line.kind, line.kind),
         f"{line.number:,}", _gb(line.bytes))
        for line in found.memory.largest
    ]  # fmt: skip
    headings = ("made by", "shape", "dtype", "kind", "tensors", "GB")
    return Table(f"Largest tensors at the peak of rank {rank:,}", headings, rows, 4)


def _collectives(rank: int, found: Rehearsed) -> Table:
    rows = [
        (line.kind, line.mesh, f"{line.ranks:,}", f"{line.calls:,}", f"{line.asynchronous:,}",
         _gb(line.bytes), f"{line.seconds:.3g}", f"{line.hidden_seconds:.3g}")
        for line in found.collectives
    ]  # fmt: skip
    headings = ("collective", "mesh", "GPUs", "calls", "asynchronous", "GB", "seconds", "hidden")
    return Table(f"Collectives of a step of rank {rank:,}", headings, rows, 2)


def _waits(rank: int, found: Rehearsed) -> Table:
    rows = [(line.place, line.what, f"{line.calls:,}") for line in found.synchronisations]
    return Table(f"Waits for the GPU in a step of rank {rank:,}", ("place", "what", "calls"), rows, 2)


def _operators(rank: int, found: Rehearsed) -> Table:
    rows = [
        (line.operator, NAMES.get(line.kind, line.kind), f"{line.calls:,}", flop(line.flops), _gb(line.bytes),
         f"{line.seconds:.3g}", f"{line.seconds / found.compute_seconds:.1%}")
        for line in found.operators[:LONGEST]
    ]  # fmt: skip
    headings = ("operator", "class", "calls", "FLOPs", "GB", "seconds", "of all")
    title = f"Operators of rank {rank:,}, which leave {found.bound:.0%} of the peak to products"
    return Table(title, headings, rows, 2)
