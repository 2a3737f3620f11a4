"""Models that score documents for filters: a trained `classifier` stage, or an existing file.

Invariant: a score is the probability of one label, and depends on the document's text and on the model alone.
Thresholds are not part of a `ScoreModel`, so changing one scores nothing again.
"""

from collections.abc import Iterator
from typing import Annotated

from pydantic import StringConstraints

from specs.base import Spec, identity, location, option, reference
from specs.sources import Url
from specs.units import Reference

FASTTEXT_SUFFIXES = (".bin", ".ftz")
FASTTEXT_CHARACTERS = 1_000_000
"""Characters of a document that a fastText model reads, unless its stage states another number."""
TOKENS = 512
"""Tokens of a document that a transformer reads, unless the recipe states another number."""
CHARACTERS_PER_TOKEN = 32
"""Characters that a document keeps, before it is tokenised, for each token that a transformer reads."""
Label = Annotated[str, StringConstraints(pattern=r"^[^/,\s]+$")]
Percentile = Annotated[str, StringConstraints(pattern=r"^p\d{1,2}(\.\d+)?$")]
"""A threshold that a `classifier` stage has stored: `p95`."""


class ScoreModel(Spec):
    """The model that scores documents: either `from` or `url`. All documents of the source are scored,
    whichever filters come before, in a separate part: another threshold scores nothing again."""

    from_: Reference | None = reference(
        None, alias="from", to="classifier", description="a `classifier` stage, whose model scores"
    )
    url: Url | None = location(
        None,
        min_length=1,
        description="fsspec URL of a folder with a Hugging Face sequence classifier (config.json,"
        " safetensors and tokenizer), or a fastText model (.bin or .ftz)",
    )
    label: Label = identity(
        description="label whose probability is the score, or whose value for a regression"
    )
    max_tokens: int | None = option(
        None,
        ge=1,
        description=f"of a document that a folder's model reads, {TOKENS} by default; a stage's model has its"
        " own",
    )

    def conflicts(self) -> Iterator[str]:
        if (self.from_ is None) == (self.url is None):
            yield "a model is a classifier stage or a file; set from or url"
        if self.max_tokens is not None and (self.url is None or self.fasttext):
            yield "max_tokens belongs to a folder with a Hugging Face classifier; leave it out"

    @property
    def fasttext(self) -> bool:
        return self.url is not None and self.url.endswith(FASTTEXT_SUFFIXES)


def percentile_name(percentile: float) -> str:
    """The name of a percentile: 95.0 -> p95."""
    return f"p{percentile:g}"
