"""Labels of similar texts, in memory and in rounds over parts of the edges, against a walk of the graph."""

from __future__ import annotations

import tracemalloc

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from apertus_model.data.corpora.duplicates import (
    Edges,
    both_ways,
    components,
    digest,
    edges_of,
    labels,
    large_star,
    small_star,
)
from apertus_model.data.corpora.plan import CorpusPlan

RANGES = 3


def _walk(pairs: list[tuple[int, int]]) -> dict[int, int]:
    """The smallest node of the component of each node that has a smaller one."""
    neighbours: dict[int, set[int]] = {}
    for one, other in pairs:
        neighbours.setdefault(one, set()).add(other)
        neighbours.setdefault(other, set()).add(one)
    found = {}
    for start in neighbours:
        seen, waiting = set(), [start]
        while waiting:
            here = waiting.pop()
            if here not in seen:
                seen.add(here)
                waiting += neighbours[here]
        if min(seen) != start:
            found[start] = min(seen)
    return found


def _part(edges: Edges, number: int) -> Edges:
    here = edges.node % RANGES == number
    return Edges(edges.node[here], edges.other[here])


def _joined(parts: list[Edges]) -> Edges:
    return Edges(*(np.concatenate(sides) for sides in zip(*parts, strict=True)))


def _in_rounds(edges: Edges) -> Edges:
    """As the units of the stage do it: each sees the edges of its nodes."""
    before, stars = None, both_ways(edges)
    while True:
        seen = sum(digest(_part(stars, number)) for number in range(RANGES)) % 2**64
        if seen == before:
            return labels(stars)
        before = seen
        large = _joined([large_star(_part(stars, number)) for number in range(RANGES)])
        stars = both_ways(_joined([small_star(_part(large, number)) for number in range(RANGES)]))


def _edges(pairs: list[tuple[int, int]]) -> Edges:
    array = np.array(pairs, np.uint64).reshape(-1, 2)
    return Edges(array.max(axis=1), array.min(axis=1))


def _as_dict(found: Edges) -> dict[int, int]:
    return dict(zip(found.node.tolist(), found.other.tolist(), strict=True))


PAIRS = st.lists(
    st.tuples(st.integers(0, 30), st.integers(0, 30)).filter(lambda p: p[0] != p[1]), max_size=40
)


@given(PAIRS)
def test_both_ways_find_the_smallest_node_of_each_component(pairs: list[tuple[int, int]]) -> None:
    """Node 0 stands for other corpora, and has no list of its own in the rounds."""
    assert _as_dict(components(_edges(pairs))) == _walk(pairs) == _as_dict(_in_rounds(_edges(pairs)))


def test_a_long_chain_is_one_component() -> None:
    nodes = np.random.default_rng(0).permutation(2001) + 1
    pairs = list(zip(nodes[:-1].tolist(), nodes[1:].tolist(), strict=True))
    expected = dict.fromkeys(range(2, 2002), 1)
    assert _as_dict(components(_edges(pairs))) == expected == _as_dict(_in_rounds(_edges(pairs)))


def test_texts_are_joined_when_they_agree_in_a_bucket() -> None:
    bucket = np.array([0, 0, 0, 1, 1], np.uint16)
    value = np.array([7, 7, 8, 7, 7], np.uint64)
    node = np.array([5, 3, 4, 4, 9], np.uint64)
    assert _as_dict(edges_of(bucket, value, node)) == {5: 3, 9: 4}


def test_one_unit_holds_the_edges_that_the_plan_gives_it_in_its_memory() -> None:
    """What `components` and the edges take as numbers, and 16 bytes of an edge as it is stored."""
    count = 200_000
    plan = CorpusPlan.make({}, 144 * count, {}, {})
    assert plan.fits(count) and not plan.fits(count + 1)
    draws = np.random.default_rng(0).integers(1, 2**63, (2, count), dtype=np.uint64)
    tracemalloc.start()
    components(Edges(draws.max(axis=0), draws.min(axis=0)))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert 64 * count < peak + 16 * count < plan.memory
