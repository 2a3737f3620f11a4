"""Sparse attention: every head computes a part of the pairs of a query and an earlier key of its document.

Source of `hash` and `drop`: Pagliardini et al. 2023, arXiv 2306.01160. Grouped queries, QK-norm and RoPE,
which that model lacks, change three things. Heads that share keys share the decisions about keys. Vectors are
hashed after their norm and before RoPE, so that a bucket depends on content and not on distance. Queries and
keys have projections of their own, and both are hashed by the same random vectors; a token can see itself,
where the paper forbids it because query and key are one vector there.

Random numbers are drawn once, and not at every step as in the paper: they are a function of the seed, the
layer and the head of the whole model. So evaluation, recomputation, resumption and layout change nothing.

Invariant: a query that has no key gives 0.
"""

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from specs.base import Spec, identity

BACKENDS = ("sdpa", "flex")
"""The attention backends that compute sparse attention."""


class Hashed(Spec):
    """Queries see keys of their own bucket. A vector's bucket is the nearest of `buckets / 2` random
    directions and their opposites."""

    sparse: Literal["hash"] = identity()
    buckets: int = identity(8, ge=2, le=1024, multiple_of=2)
    seed: int = identity(0, description="seed of the random directions")

    def share(self, sequence_length: float) -> float:
        """The share of the pairs of causal attention that is computed, if buckets are of equal size."""
        return 1 / self.buckets


class Dropped(Spec):
    """Every head leaves out a random set of queries, whose result is 0, and a random set of keys: exactly the
    stated shares of the positions of a row, the same in every row."""

    sparse: Literal["drop"] = identity()
    queries: float = identity(0.5, ge=0, lt=1, description="share that each head leaves out")
    keys: float = identity(0.5, ge=0, lt=1, description="share that each group of heads leaves out")
    seed: int = identity(0, description="seed of the sets")

    def conflicts(self) -> Iterator[str]:
        if not self.queries + self.keys:
            yield "queries and keys are 0, so nothing is left out; raise one, or leave out attention"

    def share(self, sequence_length: float) -> float:
        """The share of the pairs of causal attention that is computed."""
        return (1 - self.queries) * (1 - self.keys)


class Windowed(Spec):
    """Queries see the last `window` tokens, themselves included. This is the control of equal cost."""

    sparse: Literal["window"] = identity()
    window: int = identity(ge=1, le=2**31, description="tokens")

    def share(self, sequence_length: float) -> float:
        """The share of the pairs of causal attention that is computed, in a row of one document."""
        seen = min(self.window, sequence_length)
        pairs = seen * (seen + 1) / 2 + (sequence_length - seen) * seen
        return pairs / (sequence_length * (sequence_length + 1) / 2)


SparseAttention = Annotated[Hashed | Dropped | Windowed, Field(discriminator="sparse")]
