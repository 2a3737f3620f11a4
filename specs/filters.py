"""The filters of corpora and conversations, applied in the order in which a recipe lists them. For a filter,
a conversation is a document: `of` says what its text is, and its columns are those of its row.

Invariant: whether a document passes depends on the document alone, or (`exact-duplicates`, `near-duplicates`)
on the set of documents of its source and of the parts in `not_in`: never on their order, on the names of the
files or on how the work is split.

The order published for FineWeb-2 (swiss-ai/pretrain-data, pipelines/fineweb-2) is robots, quality, toxicity,
sampler; personal data are always replaced last.
"""

from collections.abc import Iterable, Iterator
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from specs.base import identity, location, option, reference
from specs.filter_bases import CutoffFilter, DocumentFilter, Filter, Missing, missing_value, outside
from specs.robots import RobotsFilter
from specs.scoring import Percentile, ScoreModel
from specs.sources import CONVERSATIONAL, SourceSpec, Url
from specs.units import ReferenceText

# A document with this score or more is dropped (swiss-ai/pretrain-data, pipelines/fineweb-2, and
# pipelines/fineweb for English). Languages have the codes that data sets use.
_PUBLISHED_TOXICITY = [
    (("eng", "en"), 0.999440610408783),
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
        description="other parts, of the same kind of stage: what they keep counts as seen, so whatever is"
        " like it is dropped",
    )


class LengthFilter(CutoffFilter):
    """Drops documents shorter or longer than stated, in characters. `cutoffs` replace `min_characters`."""

    filter: Literal["length"] = identity()
    min_characters: int = identity(0, ge=0)
    max_characters: int | None = identity(None, ge=1)

    def conflicts(self) -> Iterator[str]:
        least = max(self.min_characters, *self.cutoffs.values(), 0)
        if self.max_characters is not None and least > self.max_characters:
            limits = (
                f"at least {least:{'.0f' if least == int(least) else 'g'}} and at most {self.max_characters}"
            )
            yield f"no document has {limits} characters; lower min_characters"


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
    document of a language without a threshold passes.

    The score is a column made beforehand: no classifier is run here. The published classifier is a small
    network per language on embeddings of XLM-R, and its thresholds drop the 5% with the highest score
    (report, section 3.1.3). A threshold is looked up by the whole value of the language column (`deu_Latn`),
    then by its part before the first `_` or `-` (`deu`); the default table has codes of three and two
    letters.
    """

    COLUMNS: ClassVar[tuple[str, ...]] = ("column", "language_column")
    filter: Literal["toxicity"] = identity()
    classifier: str = identity(min_length=1, description="name and version of the classifier")
    column: str = option("toxic_score")
    language_column: str = option(
        "language", description="column with the language; an earlier `language` filter can add it"
    )
    thresholds: dict[str, float] = identity(default_factory=lambda: dict(TOXICITY_THRESHOLDS), min_length=1)
    missing: Missing = missing_value()


class LanguageFilter(DocumentFilter):
    """Keeps documents whose most likely language is listed and reaches its minimum score. The label (without
    `__label__`) and its score become the columns `language` and `language_score`, which later filters can
    use."""

    filter: Literal["language"] = identity()
    model: Url = location(
        min_length=1,
        description="fastText model (.bin or .ftz) on any fsspec URL, for example GlotLID or lid.176",
    )
    languages: Literal["all"] | Annotated[list[str], Field(min_length=1)] = identity(
        description="labels of the model, `de` or `deu_Latn`; or `all` of them, GlotLID's 1,811 and more"
    )
    min_score: float = identity(0.65, ge=0, le=1)
    min_scores: dict[str, Annotated[float, Field(ge=0, le=1)]] = option(
        default_factory=dict, description="another min_score for some of the labels"
    )

    def conflicts(self) -> Iterator[str]:
        for label in self.min_scores:
            if self.languages != "all" and label not in self.languages:
                yield f"min_scores names '{label}', which languages does not list; list it, or drop it"

    def files(self) -> list[SourceSpec]:
        return [outside(self.model)]

    def adds(self) -> list[str]:
        return list(LANGUAGE_COLUMNS)


class ScoreFilter(DocumentFilter):
    """Keeps documents whose score is between `min` and `max`, both included. The score is a number in a
    column, or a `model` computes it, and it becomes that column for later filters.

    `{filter: score, model: {from: toxicity, label: toxic}, max: p95, by: language}` drops the 5% of each
    language with the highest score: `p95` is a threshold that the `classifier` stage has stored."""

    filter: Literal["score"] = identity()
    column: str = identity(
        "score", min_length=1, description="required without `model`; the column that a model's score becomes"
    )
    model: ScoreModel | None = reference(
        None, description="scores the documents; without bounds, for later filters only"
    )
    min: float | Percentile | None = option(
        None, description="a number, or a percentile that the model's stage has stored: p90"
    )
    max: float | Percentile | None = option(None, description="highest score that is kept, written as `min`")
    by: str | None = option(
        None,
        description="column whose value selects a cut-off, or the language of a percentile; a language for"
        " which none is stored passes",
    )
    cutoffs: dict[str, float] = option(
        default_factory=dict,
        description="another `min` for values of `by`, for instance one that keeps the top third of each"
        " language",
    )
    ceilings: dict[str, float] = option(default_factory=dict, description="another `max` for values of `by`")
    missing: Missing = missing_value()

    def conflicts(self) -> Iterator[str]:
        selected = bool(self.cutoffs or self.ceilings or self.percentiles)
        if self.model is None:
            if "column" not in self.model_fields_set:
                yield "a score filter needs a column with the score, or a model; set one"
            if self.min is None and self.max is None and not selected:
                yield "a score filter without min, max or cutoffs keeps everything; set one"
        if self.percentiles and (self.model is None or self.model.from_ is None):
            yield (
                f"{self.percentiles[0]} is a threshold that a classifier stage has stored; set model:"
                " {from: STAGE, label: LABEL}, or a number"
            )
        if (self.by is None and (self.cutoffs or self.ceilings)) or (self.by is not None and not selected):
            yield "`by` (a column) and `cutoffs` (its values) go together; set both or none"
        for bound, others in ((self.min, self.cutoffs), (self.max, self.ceilings)):
            if others and isinstance(bound, str):
                yield f"{bound} has a threshold for each language; leave out other cut-offs"
        for value in ("", *self.cutoffs, *self.ceilings):
            low, high = self.cutoffs.get(value, self.min), self.ceilings.get(value, self.max)
            if isinstance(low, float) and isinstance(high, float) and low > high:
                yield f"no number is at least {low:g} and at most {high:g}; raise max"

    @property
    def percentiles(self) -> list[str]:
        """The stored thresholds that the filter names."""
        return [bound for bound in (self.min, self.max) if isinstance(bound, str)]

    def columns(self) -> list[str]:
        scored = [] if self.model else [self.column]
        return [*self.only, *scored, *([] if self.by is None else [self.by])]

    def adds(self) -> list[str]:
        return [self.column] if self.model else []


class SampleFilter(DocumentFilter):
    """Keeps a share of the documents, chosen by a hash of seed and text: the same documents however the work
    is split. A higher rate with the same seed keeps the same documents and more. Rates published for
    FineWeb-2: 0.95 for languages with a quality classifier and no toxicity classifier; for languages with
    neither 0.3135, where the others keep their top third, or 0.095, where they keep their top tenth."""

    COLUMNS: ClassVar[tuple[str, ...]] = ("by",)
    filter: Literal["sample"] = identity()
    rate: float = identity(ge=0, le=1)
    by: str | None = option(None, description="column whose value selects a rate")
    rates: dict[str, Annotated[float, Field(ge=0, le=1)]] = option(
        default_factory=dict, description="another rate for values of `by`"
    )
    seed: int = identity(42)

    def conflicts(self) -> Iterator[str]:
        if (self.by is None) != (not self.rates):
            yield "`by` (a column) and `rates` (of its values) go together; set both or none"


class LicenseFilter(DocumentFilter):
    """Keeps documents whose licence is one of `allow`. The comparison ignores case."""

    COLUMNS: ClassVar[tuple[str, ...]] = ("column",)
    filter: Literal["license"] = identity()
    allow: list[str] = identity(min_length=1)
    column: str = option("license")
    missing: Missing = missing_value("drop")


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

    def conflicts(self) -> Iterator[str]:
        talks = [source.url for source in self.against if source.format in CONVERSATIONAL]
        if talks:
            yield (
                f"{talks[0]} is read as conversations; questions are documents: give it a format like jsonl,"
                " with text_column"
            )
        if self.min_match > self.ngram:
            yield f"min_match {self.min_match} is more than an n-gram of {self.ngram} words; lower it"

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


def columns_read(filters: list[FilterSpec], after: Iterable[str] = ()) -> list[str]:
    """The columns of a row, besides the text, that the filters read, and those that are needed `after` them;
    sorted, without those that an earlier filter adds."""
    needed: set[str] = set()
    added: set[str] = set()
    for step in filters:
        needed |= set(step.columns()) - added
        added |= set(step.adds())
    return sorted(needed | set(after) - added)


def scored(filters: list[FilterSpec]) -> dict[int, ScoreFilter]:
    """The filters whose scores come from a model, by their step."""
    return {
        index: step
        for index, step in enumerate(filters)
        if isinstance(step, ScoreFilter) and step.model is not None
    }


def a_column_for_each_score(filters: list[FilterSpec]) -> list[FilterSpec]:
    """Returns the filters. Raises ValueError if the scores of two models would be in one column."""
    columns = [step.column for step in scored(filters).values()]
    if twice := sorted({column for column in columns if columns.count(column) > 1}):
        raise ValueError(f"two filters make the column '{twice[0]}'; set another column for one of them")
    return filters


def labels(filters: list[FilterSpec]) -> list[str]:
    """A name for each step of a list: the name of its filter, numbered from the second one of a kind on:
    `length`, `length-2`."""
    kinds = [step.filter for step in filters]
    return [
        kind if (count := kinds[: index + 1].count(kind)) == 1 else f"{kind}-{count}"
        for index, kind in enumerate(kinds)
    ]
