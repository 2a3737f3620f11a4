"""The layout of the stage graph: boxes in topological layers, and arrows around them.

Invariants: a stage is in a later layer than all its inputs; no arrow crosses a box except at its ends. An
arrow implied by others, as those from the tokenizer, is not drawn. The same graph gives the same drawing.
"""

from collections import defaultdict
from dataclasses import dataclass
from itertools import pairwise

WIDTH, HEIGHT = 190, 84  # size of a box
GAP_ALONG, GAP_ACROSS = 44, 20
MARGIN = 6
COLUMNS = 4  # boxes across a printed page, at three quarters of their size
SWEEPS = 8
Slot = str | tuple[str, str, int]  # a stage, or the passage of the arrow between two stages through a layer


@dataclass(frozen=True)
class Box:
    stage: str
    x: float
    y: float


@dataclass(frozen=True)
class Arrow:
    begin: str
    end: str
    waits: bool  # whether `end` only waits for `begin`, without reading it
    path: str


@dataclass(frozen=True)
class Drawing:
    width: float
    height: float
    boxes: list[Box]
    arrows: list[Arrow]
    cuts: list[float]  # heights between two layers where a printed page may end


def draw(reads: dict[str, list[str]], after: dict[str, list[str]]) -> Drawing:
    """Lays out stages, inputs first, with the stages that each reads, and those that it only waits for."""
    before = {stage: [*reads[stage], *after.get(stage, [])] for stage in reads}
    layer: dict[str, int] = {}
    for stage in reads:
        layer[stage] = max((layer[other] + 1 for other in before[stage]), default=0)
    above: dict[str, set[str]] = {}
    for stage in reads:
        above[stage] = set(reads[stage]).union(*(above[other] for other in reads[stage]))
    waits = {(other, stage) for stage in reads for other in after.get(stage, []) if other not in above[stage]}
    needed = [
        (other, stage)
        for stage in reads
        for other in reads[stage]
        if not any(other in above[between] for between in reads[stage])
    ]
    edges = needed + sorted(waits)
    layers: list[list[Slot]] = [
        [stage for stage in reads if layer[stage] == depth]
        for depth in range(max(layer.values(), default=0) + 1)
    ]
    routes: dict[tuple[str, str], list[Slot]] = {}
    for begin, end in edges:
        bends: list[Slot] = [(begin, end, depth) for depth in range(layer[begin] + 1, layer[end])]
        for depth, bend in enumerate(bends, layer[begin] + 1):
            layers[depth].append(bend)
        routes[begin, end] = [begin, *bends, end]
    place = _places(layers, [pair for route in routes.values() for pair in pairwise(route)])
    return _drawing(layers, routes, place, waits)


def _places(layers: list[list[Slot]], links: list[tuple[Slot, Slot]]) -> dict[Slot, float]:
    """Coordinates across the layers: each slot near the mean of its neighbours, with few crossings."""
    above, below = defaultdict[Slot, list[Slot]](list), defaultdict[Slot, list[Slot]](list)
    for begin, end in links:
        above[end].append(begin)
        below[begin].append(end)
    place = {slot: index - (len(layer) - 1) / 2 for layer in layers for index, slot in enumerate(layer)}
    for sweep in range(SWEEPS):
        backward = sweep % 2
        near = below if backward else above
        for layer in reversed(layers) if backward else layers:
            wanted = {slot: _mean([place[other] for other in near[slot]], place[slot]) for slot in layer}
            layer.sort(key=wanted.__getitem__)
            place |= _apart(layer, wanted)
    return place


def _mean(values: list[float], default: float) -> float:
    return sum(values) / len(values) if values else default


def _apart(layer: list[Slot], wanted: dict[Slot, float]) -> dict[Slot, float]:
    """The wanted coordinates, moved apart as far as boxes and passing arrows need room."""
    placed: dict[Slot, float] = {}
    last: Slot | None = None
    for slot in layer:
        room = 1.0 if isinstance(slot, str) and isinstance(last, str) else 0.75
        placed[slot] = wanted[slot] if last is None else max(wanted[slot], placed[last] + room)
        last = slot
    shift = _mean([wanted[slot] - placed[slot] for slot in layer], 0.0)
    return {slot: value + shift for slot, value in placed.items()}


def _drawing(
    layers: list[list[Slot]],
    routes: dict[tuple[str, str], list[Slot]],
    place: dict[Slot, float],
    waits: set[tuple[str, str]],
) -> Drawing:
    """The drawing on paper: left to right; deep graphs with more layers than `COLUMNS` top to bottom."""
    least, most = min(place.values(), default=0.0), max(place.values(), default=0.0)
    down = len(layers) > max(COLUMNS, most - least + 1)
    length, breadth = (HEIGHT, WIDTH) if down else (WIDTH, HEIGHT)
    along = {
        slot: depth * (length + GAP_ALONG) + MARGIN for depth, layer in enumerate(layers) for slot in layer
    }
    across = {slot: (value - least) * (breadth + GAP_ACROSS) + MARGIN for slot, value in place.items()}

    def point(forward: float, sideways: float) -> str:
        return f"{sideways:.1f} {forward:.1f}" if down else f"{forward:.1f} {sideways:.1f}"

    arrows = []
    for (begin, end), route in routes.items():
        middle = [across[slot] + breadth / 2 for slot in route]
        path = f"M {point(along[begin] + length, middle[0])}"
        for slot, (here, there) in zip(route[1:], pairwise(middle), strict=True):
            target = along[slot] - (5 if slot == end else 0)
            bend = target - GAP_ALONG / 2
            path += f" C {point(bend, here)} {point(bend, there)} {point(target, there)}"
            path += "" if slot == end else f" L {point(along[slot] + length, there)}"
        arrows.append(Arrow(begin, end, (begin, end) in waits, path))
    boxes = [
        Box(slot, *((across[slot], along[slot]) if down else (along[slot], across[slot])))
        for layer in layers
        for slot in layer
        if isinstance(slot, str)
    ]
    reach = max(along.values(), default=0) + length + MARGIN
    spread = max(across.values(), default=0) + breadth + MARGIN
    cuts = [depth * (length + GAP_ALONG) + MARGIN - GAP_ALONG / 2 for depth in range(1, len(layers))]
    return Drawing(spread, reach, boxes, arrows, cuts) if down else Drawing(reach, spread, boxes, arrows, [])
