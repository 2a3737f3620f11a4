"""The `recipe.json` of a mixture: the corpora from which its samples are drawn, and how often each.

Invariant: the sources are different corpora, in the order of their fingerprints. Weights are integers without
a common divisor.
"""

from fractions import Fraction
from typing import Literal

from pydantic import Field

from specs.foreign import Foreign

FILE = "recipe.json"


class MixtureSource(Foreign):
    """A corpus of a mixture."""

    fingerprint: str
    path: str  # of the artifact in the store
    weight: int = Field(ge=1)
    tokens: int  # of its training split
    documents: int  # of its training split


class MixtureRecipe(Foreign):
    """The content of the file. The ids are those of the tokenizer that all sources share."""

    format: Literal[2] = 2
    seed: int  # of the order of samples
    sources: list[MixtureSource]
    tokenizer: str  # fingerprint
    vocab_size: int
    bos_id: int
    eos_id: int

    @property
    def weights(self) -> list[Fraction]:
        """The weights of the sources, in their order."""
        return [Fraction(source.weight) for source in self.sources]
