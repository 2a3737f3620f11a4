"""Groups of similar texts: connected components of the graph whose nodes are hashes of texts.

An edge joins two texts that agree in a bucket of their signatures. The label of a text is the smallest node
of its component. Node `OTHER_CORPORA`, the smallest of all, stands for every document of other corpora.

The labels are found in one of two ways, with equal results: by `components`, when all edges fit into memory,
or by rounds of `large_star` and `small_star` over parts of the edges (Kiveris et al. 2014, "Connected
components in MapReduce and beyond"), until a round changes nothing.

Invariants:
- An edge is a pair (node, other). Functions return edges with node > other; `both_ways` adds the reverse
  edges, except those from `OTHER_CORPORA`: an edge to it is kept by the other node, so it has no neighbours
  to hold.
- A star step sees all edges of each node that it sees.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from apertus_model.data.order.permutation import mix_array

OTHER_CORPORA = np.uint64(0)
EDGES = pa.schema([pa.field("node", pa.uint64()), pa.field("other", pa.uint64())])
SIGNED = pa.schema(
    [pa.field("bucket", pa.uint16()), pa.field("value", pa.uint64()), pa.field("node", pa.uint64())]
)
"""A text and its value in a bucket."""

Nodes = NDArray[np.uint64]


class Edges(NamedTuple):
    """Pairs of nodes."""

    node: Nodes
    other: Nodes


def edges_of(bucket: NDArray[np.uint16], value: NDArray[np.uint64], node: Nodes) -> Edges:
    """Joins texts that have the same value in a bucket with the smallest of them. All arguments: (rows,)."""
    order = np.lexsort((node, value, bucket))
    bucket, value, node = bucket[order], value[order], node[order]
    first = np.ones(len(node), bool)
    first[1:] = (bucket[1:] != bucket[:-1]) | (value[1:] != value[:-1])
    smallest = node[first][np.cumsum(first) - 1]
    return unique(Edges(node, smallest))


def unique(edges: Edges) -> Edges:
    """The edges, sorted, without repetitions or loops."""
    order = np.lexsort((edges.other, edges.node))
    node, other = edges.node[order], edges.other[order]
    new = node != other
    new[1:] &= (node[1:] != node[:-1]) | (other[1:] != other[:-1])
    return Edges(node[new], other[new])


def both_ways(edges: Edges) -> Edges:
    """The edges and their reverse edges, except those from `OTHER_CORPORA`."""
    back = edges.other != OTHER_CORPORA
    return Edges(
        np.concatenate([edges.node, edges.other[back]]), np.concatenate([edges.other, edges.node[back]])
    )


def _smallest_neighbours(edges: Edges) -> Nodes:
    """(edges,): the smallest neighbour of the node of each edge. The edges must be sorted."""
    first = np.ones(len(edges.node), bool)
    first[1:] = edges.node[1:] != edges.node[:-1]
    return edges.other[first][np.cumsum(first) - 1]


def large_star(edges: Edges) -> Edges:
    """Joins the larger neighbours of each node with the smallest of the node and its neighbours. Takes
    edges in both directions."""
    edges = unique(edges)
    least = _smallest_neighbours(edges)
    larger = edges.other > edges.node
    leads_away = (edges.other == OTHER_CORPORA) & (least == OTHER_CORPORA)
    return unique(
        Edges(
            np.concatenate([edges.other[larger], edges.node[leads_away]]),
            np.concatenate([np.minimum(least, edges.node)[larger], edges.other[leads_away]]),
        )
    )


def small_star(edges: Edges) -> Edges:
    """Joins each node and its smaller neighbours with the smallest of them. Takes edges with node > other."""
    edges = unique(edges)
    least = _smallest_neighbours(edges)
    return unique(Edges(np.concatenate([edges.node, edges.other]), np.concatenate([least, least])))


def digest(edges: Edges) -> int:
    """A number that two different sets of edges share with a probability of 2^-64; the digest of a disjoint
    union is the sum, modulo 2^64, of the digests of its parts. Only edges with node > other count."""
    edges = unique(edges)
    down = edges.node > edges.other
    with np.errstate(over="ignore"):
        mixed = mix_array(mix_array(edges.node[down]) + edges.other[down])
        return int(mixed.sum(dtype=np.uint64))


def labels(edges: Edges) -> Edges:
    """The label of each node that is not its own label, in a graph in which each component is a star."""
    edges = unique(edges)
    down = edges.node > edges.other
    return Edges(edges.node[down], edges.other[down])


def components(edges: Edges) -> Edges:
    """The labels of any graph, computed at once. Memory: about 100 bytes an edge, besides the edges."""
    nodes = np.unique(np.concatenate([edges.node, edges.other]))
    left, right = (np.searchsorted(nodes, side) for side in edges)
    parent = np.arange(len(nodes), dtype=np.int64)
    join(parent, left, right)
    roots = roots_of(parent, np.arange(len(nodes), dtype=np.int64))
    moved = roots != np.arange(len(nodes))
    return Edges(nodes[moved], nodes[roots[moved]])


def join(parent: NDArray[np.int64], left: NDArray[np.int64], right: NDArray[np.int64]) -> None:
    """Connects pairs of members. A root is hooked to smaller roots only, so there are no cycles and the root
    of a tree is its smallest member."""
    while left.size:
        left, right = roots_of(parent, left), roots_of(parent, right)
        apart = left != right
        left, right = left[apart], right[apart]
        np.minimum.at(parent, np.maximum(left, right), np.minimum(left, right))


def roots_of(parent: NDArray[np.int64], members: NDArray[np.int64]) -> NDArray[np.int64]:
    """The roots of some members; the paths to them are shortened on the way."""
    roots = parent[members]
    while True:
        above = parent[roots]
        if np.array_equal(above, roots):
            parent[members] = roots
            return roots
        roots = above
