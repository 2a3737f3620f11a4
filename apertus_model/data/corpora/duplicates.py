"""Hashes and signatures of documents, and groups of similar ones: connected components of a graph of hashes.

Signatures are datatrove's (`MinhashDedupSignature`, as for FineWeb). Its later steps are not used: they
choose the document to keep by the number and position of its file, and require a constant number of tasks.

An edge joins two texts that agree in a bucket of their signatures. The label of a text is the smallest node
of its component. Node `OTHER_CORPORA`, the smallest of all, stands for every document of other corpora.

The labels are found in one of two ways, with equal results: by `components`, when all edges fit into memory,
or by rounds of `large_star` and `small_star` over parts of the edges (Kiveris et al. 2014, "Connected
components in MapReduce and beyond"), until a round changes nothing.

Invariants:
- A signature depends on the text and the spec. Computing it takes 128 KiB per hash of each bucket, and a few
  copies of the text.
- An edge is a pair (node, other). Functions return edges with node > other; `both_ways` adds the reverse
  edges, except those from `OTHER_CORPORA`: the other node keeps its edge to it.
- A star step sees all edges of each node that it sees.
"""

import hashlib
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import NamedTuple

import numpy as np
import pyarrow as pa
from datatrove.pipeline.dedup.minhash import MinhashConfig
from datatrove.utils.hashing import create_hash_func
from numpy.typing import NDArray

from apertus_model.data.corpora.words import simplified, split
from apertus_model.data.order.permutation import mix_array
from specs.filters import NearDuplicatesFilter

OTHER_CORPORA = np.uint64(0)
EDGES = pa.schema([pa.field("node", pa.uint64()), pa.field("other", pa.uint64())])
SIGNED = pa.schema(
    [pa.field("bucket", pa.uint16()), pa.field("value", pa.uint64()), pa.field("node", pa.uint64())]
)
"""A text and its value in a bucket."""

Nodes = NDArray[np.uint64]


class Edges(NamedTuple):
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
    node, other = edges
    return Edges(np.concatenate([node, other[back]]), np.concatenate([other, node[back]]))


def _smallest_neighbours(edges: Edges) -> Nodes:
    """(edges,): the smallest neighbour of the node of each edge. The edges must be sorted."""
    first = np.ones(len(edges.node), bool)
    first[1:] = edges.node[1:] != edges.node[:-1]
    return edges.other[first][np.cumsum(first) - 1]


def large_star(edges: Edges) -> Edges:
    """Joins the larger neighbours of each node with the smallest of these. Takes edges in both directions."""
    edges = unique(edges)
    least = _smallest_neighbours(edges)
    larger = edges.other > edges.node
    leads_away = (edges.other == OTHER_CORPORA) & (least == OTHER_CORPORA)
    nodes = np.concatenate([edges.other[larger], edges.node[leads_away]])
    others = np.concatenate([np.minimum(least, edges.node)[larger], edges.other[leads_away]])
    return unique(Edges(nodes, others))


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


SHINGLES = 4096
PRIME = np.uint64(2**61 - 1)


def text_hash(text: str, person: bytes = b"") -> int:
    """The `bytes_hash` of the text in UTF-8."""
    return bytes_hash(text.encode(), person)


def bytes_hash(data: bytes, person: bytes = b"") -> int:
    """64 bits of BLAKE2b, little endian. The expected number of collisions among n different values is n^2 /
    2^65: 0.03 among 10^9. Hashes of another `person` are independent."""
    return int.from_bytes(hashlib.blake2b(data, digest_size=8, person=person).digest(), "little")


class MinHash:
    """The signatures that one spec describes."""

    def __init__(self, spec: NearDuplicatesFilter) -> None:
        self._config = MinhashConfig(spec.ngram, spec.buckets, spec.hashes_per_bucket, spec.seed)
        random, size = np.random.RandomState(spec.seed), (1, spec.buckets * spec.hashes_per_bucket)
        self._factors, self._summands = (random.randint(least, PRIME, size, np.uint64) for least in (1, 0))
        self._hash = create_hash_func(self._config.hash_config)
        self.buckets = spec.buckets

    def hashes(self, text: str) -> NDArray[np.uint64] | None:
        """(buckets, hashes_per_bucket): the least value of each hash function over the document's n-grams.
        Two documents agree in one with a probability equal to their Jaccard similarity. None for a document
        with fewer words than an n-gram."""
        parts = [self._least(shingles) for shingles in self._shingles(text)]
        if not parts:
            return None
        return np.min(parts, axis=0).reshape(self.buckets, -1)

    def _shingles(self, text: str) -> Iterator[NDArray[np.uint64]]:
        """Hashes of n-grams, (n, 1), at most SHINGLES at a time."""
        size = self._config.n_grams
        words = split(simplified(text, self._config.norm_config))
        held = list(islice(words, SHINGLES + size - 1))
        while len(held) >= size:
            grams = zip(*(held[start:] for start in range(size)), strict=False)
            yield np.fromiter(map(self._hash, map(" ".join, grams)), np.uint64).reshape(-1, 1)
            held = held[len(held) - size + 1 :]
            held += islice(words, SHINGLES)

    def _least(self, shingles: NDArray[np.uint64]) -> NDArray[np.uint64]:
        """(hashes,): the least value of each hash function, as datatrove's `get_signature` computes it."""
        values = shingles * self._factors + self._summands
        values = (values & PRIME) + (values >> np.uint64(61))  # modulo the prime, or larger by one prime
        return np.minimum(values, values - PRIME).min(axis=0)

    def signature(self, text: str) -> NDArray[np.uint64]:
        """(buckets,): 64 bits for each bucket, equal where all of its hashes are equal. Among 10^9 documents
        without a similar pair, fewer than one pair (0.03 per bucket) is expected to agree."""
        hashes = self.hashes(text)
        if hashes is None:
            return np.full(self.buckets, text_hash(text), np.uint64)
        return np.array([bytes_hash(row.tobytes()) for row in hashes.astype("<u8")], np.uint64)


def first_alike(count: int, buckets: Iterable[NDArray[np.uint64]]) -> NDArray[np.int64]:
    """(count,): for each document the smallest index in its group. Two are alike when they have the same
    value in one of the `buckets`, (count,) each. Memory: 8 bytes per document for the result and 32 for a
    bucket (its values, their order, and the pairs of equal neighbours in it)."""
    parent = np.arange(count, dtype=np.int64)
    for values in buckets:
        order = np.argsort(values, kind="stable")
        same = values[order[1:]] == values[order[:-1]]
        join(parent, order[:-1][same], order[1:][same])
    return roots_of(parent, np.arange(count, dtype=np.int64))
