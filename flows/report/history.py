"""The rows of training as curves over consumed tokens.

Owns the token axis: a stage that starts from a checkpoint begins at the tokens of its lineage at that step.

Invariant: thinning never invents a value, and keeps the ends and the extremes of every bucket.
"""

import math
from array import array
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from flows.format import is_number
from flows.planning.graph import Graph, Node
from flows.planning.plan import Plan
from flows.stored_part import planned_part

LIMIT = 2000  # points of one series
SMOOTHED = 40  # a running mean covers a curve's length / 40 on either side, at least LEAST
LEAST = 5
LINEAGE = ("parent", "checkpoint")  # roles of the inputs that a part continues from
BOOKKEEPING = ("step", "tokens", "time")
COMMON = ("loss", "lr", "grad_norm", "tokens_per_second", "masked_share")


@dataclass(frozen=True)
class Series:
    x: list[float]
    y: list[float]


@dataclass(frozen=True)
class Curve:
    """The recorded rows of a training stage, thinned."""

    stage: str
    kind: str
    columns: dict[str, Series] = field(default_factory=dict)
    smooth: dict[str, Series] = field(default_factory=dict)
    heldout: dict[str, Series] = field(default_factory=dict)
    norms: dict[str, Series] = field(default_factory=dict)  # by kind and layer: `weights/layers.0`
    broken: int = 0  # values that are not finite

    @property
    def extras(self) -> list[str]:
        """Columns that not every kind of training has."""
        return [name for name in self.columns if name not in COMMON]


def tokens_before(graph: Graph, node: Node) -> int:
    """The tokens that the lineage of a part has consumed when the part begins; the most, if it was made from
    several checkpoints."""
    before = [
        tokens_before(graph, graph.nodes[input_.node]) + graph.nodes[input_.node].tokens_until(input_.step)
        for role, input_ in node.inputs.items()
        if input_.node in graph.nodes and input_.step is not None and role.split(":")[0] in LINEAGE
    ]
    return max(before, default=0)


def curve(plan: Plan, stage: str) -> Curve | None:
    """The curve of a training stage; None where nothing is recorded yet."""
    nodes = [node for node in plan.graph.of(stage) if node.end_step is not None]
    columns: dict[str, _Column] = defaultdict(_Column)
    nested = {"validation": defaultdict[str, _Column](_Column), "norms": defaultdict[str, _Column](_Column)}
    for node in nodes:
        before = tokens_before(plan.graph, node)
        for row in planned_part(plan, node).history():
            x = before + node.tokens_until(row["step"])
            for name, value in row.items():
                if name not in BOOKKEEPING and is_number(value):
                    columns[name].add(x, value)
            for group, of_group in nested.items():
                for name, value in row.get(group, {}).items():
                    of_group[name].add(x, value)
    if not columns and not nested["validation"]:
        return None
    columns = dict(sorted(columns.items()))
    heldout, norms = (
        {name: thin(column.x, column.y) for name, column in group.items()} for group in nested.values()
    )
    return Curve(
        stage,
        nodes[0].kind,
        {name: thin(column.x, column.y) for name, column in columns.items()},
        {name: thin(column.x, column.smooth()) for name, column in columns.items()},
        heldout,
        norms,
        sum(column.broken for group in (columns, *nested.values()) for column in group.values()),
    )


class _Column:
    """A growing series of finite values, at 16 bytes per point."""

    def __init__(self) -> None:
        self.x = array("d")
        self.y = array("d")
        self.broken = 0

    def add(self, x: float, y: float) -> None:
        if math.isfinite(y):
            self.x.append(x)
            self.y.append(y)
        else:
            self.broken += 1

    def smooth(self) -> list[float]:
        return running_mean(self.y, max(LEAST, len(self.y) // SMOOTHED))


def thin(xs: Sequence[float], ys: Sequence[float], limit: int = LIMIT) -> Series:
    """At most `limit` points: the smallest and the largest value of each bucket, and the two ends."""
    count = len(ys)
    if count <= limit:
        return Series([round(x) for x in xs], list(map(_short, ys)))
    buckets = (limit - 2) // 2
    keep = {0, count - 1}
    for bucket in range(buckets):
        inside = range(1 + bucket * (count - 2) // buckets, 1 + (bucket + 1) * (count - 2) // buckets)
        keep |= {min(inside, key=ys.__getitem__), max(inside, key=ys.__getitem__)}
    kept = sorted(keep)
    return Series([round(xs[index]) for index in kept], [_short(ys[index]) for index in kept])


def _short(value: float) -> float:
    return float(f"{value:.6g}")


def running_mean(values: Sequence[float], half: int) -> list[float]:
    """The mean of each value and up to `half` neighbours on either side."""
    sums = [0.0]
    for value in values:
        sums.append(sums[-1] + value)
    bounds = ((max(0, index - half), min(len(values), index + half + 1)) for index in range(len(values)))
    return [(sums[high] - sums[low]) / (high - low) for low, high in bounds]
