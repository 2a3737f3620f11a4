"""The filters of corpora and conversations: what is kept, in the order in which a recipe lists them. For a
filter, a conversation is a document: its text is what `of` says, its columns are those of its row.

Invariants:
- Whether a document passes depends on the document alone, or (`exact-duplicates`, `near-duplicates`) on the
  set of documents of its source and of the parts in `not_in`: never on their order, on the names of the files
  or on how the work is split.
- `files()` names the files that a filter reads beside the documents. The planner fingerprints their content,
  so their URLs are not identity fields.
- `columns()` names the columns of a row that a filter reads.

The order published for FineWeb-2 (swiss-ai/pretrain-data, pipelines/fineweb-2) is robots, quality, toxicity,
sampler; personal data are always replaced last.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from specs.base import Spec, execution, identity, reference
from specs.sources import CONVERSATIONAL, SourceSpec, resolve_url
from specs.units import ReferenceText

# The crawlers of AI companies, and `*` for all (swiss-ai/pretrain-data, robots_filter.py).
ROBOTS_AGENTS = [
    "AI2Bot",
    "Applebot-Extended",
    "Bytespider",
    "CCBot",
    "ClaudeBot",
    "cohere-training-data-crawler",
    "Diffbot",
    "FacebookBot",
    *("Google-Extended", "GPTBot", "Meta-ExternalAgent", "PanguBot", "*"),
]
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
Missing = Literal["error", "keep", "drop"]
LANGUAGE_COLUMNS = ("language", "language_score")
"""The columns that a language filter adds for the filters after it."""


class Filter(Spec):
    """Base of all filters."""

    of: Literal["conversation", "answer"] = identity(
        "conversation",
        neutral="conversation",
        description=(
            "of conversations, the text that is read. conversation: the texts of all messages in order,"
            " thoughts and outputs of tools among them and calls as JSON, with blank lines between them;"
            " answer: the responses of the last message or, where it has none, all of its texts"
        ),
    )

    def files(self) -> list[SourceSpec]:
        """The files that the filter reads from outside the store."""
        return []

    def columns(self) -> list[str]:
        """Columns of a row that the filter needs, beside the text."""
        return []


def _missing(default: Missing = "error") -> Missing:
    value: Missing = identity(
        default,
        neutral=default,
        description="what to do with a document without a value in the column",
    )
    return value


def _outside(url: str) -> SourceSpec:
    return SourceSpec(url=url, format="text")


def _not_in() -> Any:
    return reference(
        default_factory=list,
        to=("corpus", "conversations"),
        description=(
            "other parts, of the same kind of stage: what they keep counts as seen, so whatever is like it is"
            " dropped"
        ),
    )


class LengthFilter(Filter):
    """Drops documents shorter or longer than stated, in characters."""

    filter: Literal["length"] = identity()
    min_characters: int = identity(0, ge=0)
    max_characters: int | None = identity(None, ge=1)

    @model_validator(mode="after")
    def _keeps_something(self) -> LengthFilter:
        if self.max_characters is not None and self.min_characters > self.max_characters:
            limits = f"at least {self.min_characters} and at most {self.max_characters}"
            raise ValueError(f"no document has {limits} characters; lower min_characters")
        return self


class AlphabeticFilter(Filter):
    """Drops documents in which letters (of any script) and spaces are a smaller share of the characters
    than `min_share`."""

    filter: Literal["alphabetic"] = identity()
    min_share: float = identity(0.6, ge=0, le=1)


class RepeatedLinesFilter(Filter):
    """Drops documents in which repeated lines hold a larger share of the characters than `max_share`."""

    filter: Literal["repeated-lines"] = identity()
    max_share: float = identity(0.3, ge=0, le=1)


class RobotsFilter(Filter):
    """Drops documents of hosts that have since excluded crawlers for AI in their robots.txt.

    A listed domain stands for itself and all of its subdomains: `example.org` excludes `www.example.org`,
    while `blog.example.org` does not exclude `example.org`. A domain is excluded as a whole; the published
    code checked each address against the host's robots.txt.
    """

    filter: Literal["robots"] = identity()
    domains: str = execution(
        min_length=1,
        description=(
            "file on any fsspec URL, plain or compressed (.gz, .zst, ...): `*.csv` with the columns `domain`"
            " and `agent`, or `*.jsonl` with these keys: rows with one of `agents` count; any other"
            " file has one domain per line, and `#` begins a comment"
        ),
    )
    agents: list[str] = identity(
        default_factory=lambda: list(ROBOTS_AGENTS),
        min_length=1,
        description="crawlers whose exclusion counts; the published ones by default",
    )
    column: str = identity("url", neutral="url", description="holds the document's address")
    missing: Missing = _missing()

    @field_validator("domains")
    @classmethod
    def _readable(cls, url: str) -> str:
        resolve_url(url)
        return url

    def files(self) -> list[SourceSpec]:
        return [_outside(self.domains)]

    def columns(self) -> list[str]:
        return [self.column]


class ToxicityFilter(Filter):
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
    missing: Missing = _missing()

    def columns(self) -> list[str]:
        return [self.column, self.language_column]


class LanguageFilter(Filter):
    """Keeps documents whose most likely language is listed and has at least `min_score`. The label (without
    `__label__`) and its score become the columns `language` and `language_score`, which later filters can
    use."""

    filter: Literal["language"] = identity()
    model: str = execution(
        min_length=1,
        description="fastText model (.bin or .ftz) on any fsspec URL, for example GlotLID or lid.176",
    )
    languages: list[str] = identity(min_length=1, description="labels of the model: `de` or `deu_Latn`")
    min_score: float = identity(0.65, ge=0, le=1)

    @field_validator("model")
    @classmethod
    def _readable(cls, url: str) -> str:
        resolve_url(url)
        return url

    def files(self) -> list[SourceSpec]:
        return [_outside(self.model)]


class ScoreFilter(Filter):
    """Keeps documents whose number in a column is between `min` and `max`, both included: quality
    cut-offs."""

    filter: Literal["score"] = identity()
    column: str = identity(min_length=1)
    min: float | None = identity(None, neutral=None)
    max: float | None = identity(None, neutral=None)
    by: str | None = identity(None, neutral=None, description="column whose value selects a cut-off")
    cutoffs: dict[str, float] = identity(
        default_factory=dict,
        neutral={},
        description=(
            "another `min` for values of `by`, for instance one that keeps the top third of each language"
        ),
    )
    missing: Missing = _missing()

    @model_validator(mode="after")
    def _bounded(self) -> ScoreFilter:
        if self.min is None and self.max is None and not self.cutoffs:
            raise ValueError("a score filter without min, max or cutoffs keeps everything; state one")
        if (self.by is None) != (not self.cutoffs):
            raise ValueError("`by` (a column) and `cutoffs` (its values) go together; state both or none")
        least = max((low for low in (self.min, *self.cutoffs.values()) if low is not None), default=None)
        if self.max is not None and least is not None and least > self.max:
            raise ValueError(f"no number is at least {least:g} and at most {self.max:g}; raise max")
        return self

    def columns(self) -> list[str]:
        return [self.column] if self.by is None else [self.column, self.by]


class SampleFilter(Filter):
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
        return [] if self.by is None else [self.by]


class LicenseFilter(Filter):
    """Keeps documents whose licence is one of `allow`. The comparison ignores case."""

    filter: Literal["license"] = identity()
    allow: list[str] = identity(min_length=1)
    column: str = identity("license", neutral="license")
    missing: Missing = _missing("drop")

    def columns(self) -> list[str]:
        return [self.column]


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


class DecontaminateFilter(Filter):
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
