"""The filters of corpora and conversations: what is kept, in the order in which a recipe lists them. For a
filter, a conversation is a document: its text is what `of` says, its columns are those of its row.

Invariant: whether a document passes depends on the document alone, or (`exact-duplicates`, `near-duplicates`)
on the set of documents of its source and of the parts in `not_in`: never on their order, on the names of the
files or on how the work is split.

The order published for FineWeb-2 (swiss-ai/pretrain-data, pipelines/fineweb-2) is robots, quality, toxicity,
sampler; personal data are always replaced last.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from specs.base import execution, identity, reference
from specs.filter_bases import CutoffFilter, DocumentFilter, Filter, Missing, missing_value, outside
from specs.robots import RobotsFilter
from specs.sources import CONVERSATIONAL, SourceSpec, resolve_url
from specs.units import ReferenceText

# A document is dropped from this score on (swiss-ai/pretrain-data, pipelines/fineweb-2), under the codes that
# data sets use.
_PUBLISHED_TOXICITY = [
    *((("deu", "de"), 0.9977), (("fra", "fr"), 0.9994), (("pol", "pl"), 0.9867), (("por", "pt"), 0.9476)),
    (("spa", "es"), 0.9953),
    (("ita", "it"), 0.9985),
    (("cmn", "zho", "zh"), 0.5954),
    (("nld", "nl"), 0.9883),
]
TOXICITY_THRESHOLDS = {code: threshold for codes, threshold in _PUBLISHED_TOXICITY for code in codes}
LANGUAGE_COLUMNS = ("language", "language_score")
"""The columns that a language filter adds for the filters after it."""


def _not_in() -> Any:
    return reference(
        default_factory=list,
        to=("corpus", "conversations"),
        description=(
            "other parts, of the same kind of stage: what they keep counts as seen, so whatever is like it is"
            " dropped"
        ),
    )


class LengthFilter(CutoffFilter):
    """Drops documents shorter or longer than stated, in characters. `cutoffs` replace `min_characters`."""

    filter: Literal["length"] = identity()
    min_characters: int = identity(0, ge=0)
    max_characters: int | None = identity(None, ge=1)

    @model_validator(mode="after")
    def _keeps_something(self) -> LengthFilter:
        least = max(self.min_characters, *self.cutoffs.values(), 0)
        if self.max_characters is not None and least > self.max_characters:
            limits = f"at least {least:g} and at most {self.max_characters}"
            raise ValueError(f"no document has {limits} characters; lower min_characters")
        return self


class AlphabeticFilter(CutoffFilter):
    """Drops documents in which letters (of any script) and spaces are a smaller share of the characters
    than `min_share`, which `cutoffs` replace."""

    filter: Literal["alphabetic"] = identity()
    min_share: float = identity(0.6, ge=0, le=1)


class RepeatedLinesFilter(CutoffFilter):
    """Drops documents in which repeated lines hold a larger share of the characters than `max_share`, which
    `cutoffs` replace."""

    filter: Literal["repeated-lines"] = identity()
    max_share: float = identity(0.3, ge=0, le=1)


class ToxicityFilter(DocumentFilter):
    """Drops documents whose score by a toxicity classifier reaches the threshold of their language; a
    language without one passes.

    The score is a column made beforehand: no classifier is run here. The published classifier is a small
    network per language on embeddings of XLM-R, and its thresholds drop the 5% with the highest score
    (report, section 3.1.3). A threshold is looked up by the whole value of the language column (`deu_Latn`),
    then by its part before the first `_` or `-` (`deu`); the default table has codes of three and two
    letters.
    """

    filter: Literal["toxicity"] = identity()
    classifier: str = identity(min_length=1, description="name and version of the classifier")
    column: str = identity("toxic_score", neutral="toxic_score")
    language_column: str = identity(
        "language",
        neutral="language",
        description="column with the language; an earlier `language` filter can add it",
    )
    thresholds: dict[str, float] = identity(default_factory=lambda: dict(TOXICITY_THRESHOLDS), min_length=1)
    missing: Missing = missing_value()

    def columns(self) -> list[str]:
        return [*super().columns(), self.column, self.language_column]


class LanguageFilter(DocumentFilter):
    """Keeps documents whose most likely language is listed and has at least its score. The label (without
    `__label__`) and its score become the columns `language` and `language_score`, which later filters can
    use."""

    filter: Literal["language"] = identity()
    model: str = execution(
        min_length=1,
        description="fastText model (.bin or .ftz) on any fsspec URL, for example GlotLID or lid.176",
    )
    languages: Literal["all"] | Annotated[list[str], Field(min_length=1)] = identity(
        description="labels of the model, `de` or `deu_Latn`; or `all` of them, GlotLID's 1,811 and more"
    )
    min_score: float = identity(0.65, ge=0, le=1)
    min_scores: dict[str, Annotated[float, Field(ge=0, le=1)]] = identity(
        default_factory=dict, neutral={}, description="another min_score for some of the labels"
    )

    @model_validator(mode="after")
    def _of_listed(self) -> LanguageFilter:
        for label in self.min_scores:
            if self.languages != "all" and label not in self.languages:
                raise ValueError(
                    f"min_scores names '{label}', which languages does not list; list it, or drop it"
                )
        return self

    @field_validator("model")
    @classmethod
    def _readable(cls, url: str) -> str:
        resolve_url(url)
        return url

    def files(self) -> list[SourceSpec]:
        return [outside(self.model)]


class ScoreFilter(CutoffFilter):
    """Keeps documents whose number in a column is between `min` and `max`, both included: quality
    cut-offs. `cutoffs` replace `min`, for instance by ones that keep the top third of each language."""

    filter: Literal["score"] = identity()
    column: str = identity(min_length=1)
    min: float | None = identity(None, neutral=None)
    max: float | None = identity(None, neutral=None)
    missing: Missing = missing_value()

    @model_validator(mode="after")
    def _bounded(self) -> ScoreFilter:
        if self.min is None and self.max is None and not self.cutoffs:
            raise ValueError("a score filter without min, max or cutoffs keeps everything; state one")
        least = max((low for low in (self.min, *self.cutoffs.values()) if low is not None), default=None)
        if self.max is not None and least is not None and least > self.max:
            raise ValueError(f"no number is at least {least:g} and at most {self.max:g}; raise max")
        return self

    def columns(self) -> list[str]:
        return [*super().columns(), self.column]


class SampleFilter(DocumentFilter):
    """Keeps a share of the documents, chosen by a hash of seed and text: the same documents however the work
    is split. A higher rate with the same seed keeps the same documents and more. Rates published for
    FineWeb-2: 0.95 for languages with a quality classifier and no toxicity classifier; for languages with
    neither 0.3135, where the others keep their top third, or 0.095, where they keep their top tenth."""

    filter: Literal["sample"] = identity()
    rate: float = identity(ge=0, le=1)
    by: str | None = identity(None, neutral=None, description="column whose value selects a rate")
    rates: dict[str, Annotated[float, Field(ge=0, le=1)]] = identity(
        default_factory=dict,
        neutral={},
        description="another rate for values of `by`",
    )
    seed: int = identity(42)

    @model_validator(mode="after")
    def _complete(self) -> SampleFilter:
        if (self.by is None) != (not self.rates):
            raise ValueError("`by` (a column) and `rates` (of its values) go together; state both or none")
        return self

    def columns(self) -> list[str]:
        return [*super().columns(), *([] if self.by is None else [self.by])]


class LicenseFilter(DocumentFilter):
    """Keeps documents whose licence is one of `allow`. The comparison ignores case."""

    filter: Literal["license"] = identity()
    allow: list[str] = identity(min_length=1)
    column: str = identity("license", neutral="license")
    missing: Missing = missing_value("drop")

    def columns(self) -> list[str]:
        return [*super().columns(), self.column]


class ExactDuplicatesFilter(Filter):
    """Of all documents of the source with the same text, keeps the one whose columns have the smallest
    hash."""

    filter: Literal["exact-duplicates"] = identity()
    not_in: list[ReferenceText] = _not_in()


class NearDuplicatesFilter(Filter):
    """Of each group of similar documents of the source, keeps the one with the smallest content hash.

    MinHash with locality-sensitive hashing (Broder 1997; datatrove's signatures): two documents are joined
    when all hashes of a bucket agree. If the word n-grams of the two have the Jaccard similarity s, this
    happens with probability 1 - (1 - s^hashes)^buckets. One document of each connected component stays. The
    defaults, as for FineWeb, join 92% of the pairs at s = 0.8 and 1% at 0.4. A document with fewer words than
    an n-gram is joined with copies of its text only.
    """

    filter: Literal["near-duplicates"] = identity()
    not_in: list[ReferenceText] = _not_in()
    ngram: int = identity(5, ge=1, description="words; each character of scripts without spaces is a word")
    buckets: int = identity(14, ge=1, le=10_000)
    hashes_per_bucket: int = identity(8, ge=1, le=10_000)
    seed: int = identity(1, ge=0, lt=2**32)


class DecontaminateFilter(DocumentFilter):
    """Drops documents that contain test questions.

    The rule is that of the report for its instruction data, with words in place of tokens. A document that
    shares an n-gram with a question is aligned with it (Ratcliff and Obershelp, as in Python's difflib), and
    dropped when matches of at least `min_match` words cover more than `max_share` of the question. For a
    question shorter than an n-gram, the document must contain all its words in sequence."""

    filter: Literal["decontaminate"] = identity()
    against: list[SourceSpec] = identity(
        min_length=1, description="evaluation sets; each document of these sources is a question"
    )
    ngram: int = identity(8, ge=1, description="words")
    min_match: int = identity(5, ge=1, description="words")
    max_share: float = identity(0.5, ge=0, lt=1)

    @model_validator(mode="after")
    def _sensible(self) -> DecontaminateFilter:
        talks = [source.url for source in self.against if source.format in CONVERSATIONAL]
        if talks:
            raise ValueError(
                f"{talks[0]} is read as conversations; questions are documents: give it a format like jsonl,"
                " with text_column"
            )
        if self.min_match > self.ngram:
            raise ValueError(
                f"min_match {self.min_match} is more than an n-gram of {self.ngram} words; lower it"
            )
        return self

    def files(self) -> list[SourceSpec]:
        return self.against


FilterSpec = Annotated[
    LengthFilter
    | AlphabeticFilter
    | RepeatedLinesFilter
    | RobotsFilter
    | ToxicityFilter
    | LanguageFilter
    | ScoreFilter
    | SampleFilter
    | LicenseFilter
    | ExactDuplicatesFilter
    | NearDuplicatesFilter
    | DecontaminateFilter,
    Field(discriminator="filter"),
]
GLOBAL_FILTERS = (ExactDuplicatesFilter, NearDuplicatesFilter)


def columns_read(filters: list[FilterSpec]) -> list[str]:
    """Columns of a row, beside the text, that the filters read; sorted, without those that an earlier filter
    adds."""
    needed: set[str] = set()
    made: set[str] = set()
    for step in filters:
        needed |= set(step.columns()) - made
        made |= set(LANGUAGE_COLUMNS) if isinstance(step, LanguageFilter) else set()
    return sorted(needed)


def labels(filters: list[FilterSpec]) -> list[str]:
    """A name for each step of a list: the name of its filter, numbered from the second one of a kind on:
    `length`, `length-2`."""
    kinds = [step.filter for step in filters]
    return [
        kind if (count := kinds[: index + 1].count(kind)) == 1 else f"{kind}-{count}"
        for index, kind in enumerate(kinds)
    ]
