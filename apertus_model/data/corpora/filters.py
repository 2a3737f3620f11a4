"""The filters of single documents: one step for each spec of `specs.filters`.

Invariant: a step reads one document and the files that its spec names, so the dropped documents do not depend
on the order or the split of the work. Steps over the whole source are in `duplicates.py`.

datatrove's filters are not used where they would break that: its sampler draws from a generator per task, its
URL filter loads lists from the network, its language filter downloads a model.
"""

import hashlib
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from datatrove.data import Document
from datatrove.pipeline.filters.gopher_repetition_filter import find_duplicates

from apertus_model.data.corpora.decontamination import Contamination, load_questions
from apertus_model.data.corpora.language import LanguageIdentifier
from apertus_model.data.documents.addresses import parse
from apertus_model.data.robots import Robots
from apertus_model.data.robots import load as load_robots
from apertus_model.data.robots.rules import LISTED, Exclusion
from infra.store.inputs import SourceError
from specs.filter_bases import CutoffFilter, Missing
from specs.filters import (
    LANGUAGE_COLUMNS,
    AlphabeticFilter,
    DecontaminateFilter,
    FilterSpec,
    LanguageFilter,
    LengthFilter,
    LicenseFilter,
    RepeatedLinesFilter,
    SampleFilter,
    ScoreFilter,
    ToxicityFilter,
)
from specs.robots import RobotsFilter


class Drop(NamedTuple):
    value: str  # what was measured
    rule: str  # what is required
    excluded: Exclusion | None = None  # where a robots.txt excludes it

    @property
    def reason(self) -> str:
        return f"{self.value}; required: {self.rule}"


Check = Callable[[Document], Drop | None]


def make_check(spec: FilterSpec, scratch: Path) -> Check:
    """The step of a filter's spec: a function of a document that returns the reason for dropping it, or None,
    and raises SourceError for a document that lacks a column. `scratch` holds local copies of remote
    models, and snapshots of robots.txt. SourceError when a file that the spec names cannot be read."""
    check = _check(spec, scratch)
    if not (only := getattr(spec, "only", {})):
        return check
    concerns = limited_to(only)
    return lambda document: check(document) if concerns(document.metadata) else None


def limited_to(only: Mapping[str, Sequence[str]]) -> Callable[[Mapping[str, Any]], bool]:
    """A function that says whether the columns of a document have the values of an `only`."""
    allowed = [(column, frozenset(values)) for column, values in only.items()]
    return lambda columns: all(str(columns.get(column)) in values for column, values in allowed)


def _check(spec: FilterSpec, scratch: Path) -> Check:
    match spec:
        case RobotsFilter():
            return partial(_robots, spec, load_robots(spec, scratch))
        case LanguageFilter():
            return partial(_language, spec, LanguageIdentifier.load(spec, scratch))
        case DecontaminateFilter():
            return partial(_contamination, spec, load_questions(spec.model_dump_json()))
    return partial(_OF_DOCUMENTS[type(spec)], spec)


def _length(spec: LengthFilter, document: Document) -> Drop | None:
    length, least = len(document.text), _cutoff(spec, document, spec.min_characters)
    if length < least:
        return Drop(f"{length} characters", f"at least {least:g}")
    if spec.max_characters is not None and length > spec.max_characters:
        return Drop(f"{length} characters", f"at most {spec.max_characters}")
    return None


def _alphabetic(spec: AlphabeticFilter, document: Document) -> Drop | None:
    """Requires that letters of any script and white space are at least `min_share` of the characters."""
    # Combining marks belong to the letters of many scripts, but `isalpha` does not count them.
    plain = sum(
        character.isalpha() or character.isspace() or unicodedata.category(character)[0] == "M"
        for character in document.text
    )
    least = _cutoff(spec, document, spec.min_share)
    if plain >= least * len(document.text):
        return None
    return Drop(f"letters are {plain / len(document.text):.3f}", f"at least {least:g}")


def _repeated_lines(spec: RepeatedLinesFilter, document: Document) -> Drop | None:
    """Requires that repeated lines are at most `max_share` of the text (arXiv 2112.11446, table A1)."""
    _, repeated = find_duplicates([line for line in document.text.splitlines() if line.strip()])
    most = _cutoff(spec, document, spec.max_share)
    if repeated <= most * len(document.text):
        return None
    return Drop(f"repeated lines are {repeated / len(document.text):.3f}", f"at most {most:g}")


def _score(spec: ScoreFilter, document: Document) -> Drop | None:
    """Requires a number from `min` (or the cut-off of the value in column `by`) to `max` (or its ceiling). A
    model's score is in the column already, and percentiles are numbers (`scored.py`)."""
    value = _number(document, spec.column, spec.missing)
    if value is None:
        return _absent(spec.column, spec.missing)
    least, most = (
        bound if spec.by is None else others.get(str(document.metadata.get(spec.by)), bound)
        for bound, others in ((spec.min, spec.cutoffs), (spec.max, spec.ceilings))
    )
    if isinstance(least, float) and value < least:
        return Drop(f"{spec.column} {value:g}", f"at least {least:g}")
    if isinstance(most, float) and value > most:
        return Drop(f"{spec.column} {value:g}", f"at most {most:g}")
    return None


def _sample(spec: SampleFilter, document: Document) -> Drop | None:
    """Requires that a hash of the text, as a number in [0, 1), is below the rate. The hash is keyed, so it is
    independent of the one that chooses held-out documents."""
    rate = spec.rate if spec.by is None else spec.rates.get(str(document.metadata.get(spec.by)), spec.rate)
    key = f"sample {spec.seed}".encode()
    digest = hashlib.blake2b(document.text.encode(), digest_size=8, key=key).digest()
    place = int.from_bytes(digest, "little") / 2**64
    return None if place < rate else Drop(f"drew {place:.4f}", f"below {rate:g}")


def _license(spec: LicenseFilter, document: Document) -> Drop | None:
    value = _column(document, spec.column, spec.missing)
    if value is None:
        return _absent(spec.column, spec.missing)
    allowed = str(value).strip().casefold() in {name.strip().casefold() for name in spec.allow}
    return None if allowed else Drop(str(value), "an allowed licence")


def _toxicity(spec: ToxicityFilter, document: Document) -> Drop | None:
    """Requires a score below the threshold of the document's language."""
    language = _column(document, spec.language_column, spec.missing)
    if language is None:
        return _absent(spec.language_column, spec.missing)
    name = str(language)
    threshold = spec.thresholds.get(name, spec.thresholds.get(name.replace("-", "_").split("_")[0]))
    if threshold is None:
        return None
    value = _number(document, spec.column, spec.missing)
    if value is None:
        return _absent(spec.column, spec.missing)
    if value < threshold:
        return None
    return Drop(f"{value:g} by {spec.classifier}", f"below {threshold:g} for {name}")


def _robots(spec: RobotsFilter, robots: Robots, document: Document) -> Drop | None:
    """Requires an address from which no agent is excluded. An address without a host counts as missing."""
    text = _column(document, spec.column, spec.missing)
    address = parse(str(text)) if text is not None else None
    if address is None:
        if text is not None and spec.missing == "error":
            raise SourceError(
                f"document {document.id}: '{text}' in column '{spec.column}' has no host. Fix: set missing:"
                " keep or drop"
            )
        return _absent(spec.column, spec.missing)
    excluded = robots.excluded(address)
    if excluded is None:
        return None
    agents = "" if excluded.agents == (LISTED,) else f", closed to {', '.join(excluded.agents)}"
    return Drop(f"{address.host}{agents}", excluded.rule, excluded)


def _language(spec: LanguageFilter, language: LanguageIdentifier, document: Document) -> Drop | None:
    """Requires that the most likely label is listed and has at least its minimum score."""
    label, score = language.identify(document.text)
    document.metadata |= dict(zip(LANGUAGE_COLUMNS, (label, score), strict=True))
    least = spec.min_scores.get(label, spec.min_score)
    listed = spec.languages == "all" or label in spec.languages
    if label and listed and score >= least:
        return None
    wanted = "a language" if spec.languages == "all" else " or ".join(spec.languages)
    return Drop(f"{label} {score:.3f}", f"{wanted}, at least {least:g}")


def _contamination(
    spec: DecontaminateFilter, contamination: Contamination, document: Document
) -> Drop | None:
    """Requires that the document covers at most `max_share` of every question."""
    share, question = contamination.worst(document.text) or (0.0, "")
    if share <= spec.max_share:
        return None
    return Drop(f"{share:.3f} of the question '{question[:200]}'", f"at most {spec.max_share:g}")


def _cutoff(spec: CutoffFilter, document: Document, general: float) -> float:
    """The cut-off of the value in the column `by`, or the general cut-off."""
    if spec.by is None:
        return general
    return spec.cutoffs.get(str(document.metadata.get(spec.by)), general)


def _column(document: Document, column: str, missing: Missing) -> Any:
    """The value in a column, or None if there is none. SourceError if `missing` makes that an error."""
    value = document.metadata.get(column)
    if value not in (None, ""):
        return value
    if missing == "error":
        filled = sorted(name for name, other in document.metadata.items() if other is not None)
        raise SourceError(
            f"document {document.id} has nothing in column '{column}', which a filter needs; it has"
            f" {', '.join(filled) or 'none'}. Fix: correct the name of the column, or set missing: keep or"
            " drop"
        )
    return None


def _number(document: Document, column: str, missing: Missing) -> float | None:
    value = _column(document, column, missing)
    if value is None:
        return None
    try:
        return float(value)
    except (TypeError, ValueError):
        problem = f"document {document.id}: column '{column}' holds {str(value)[:80]!r}"
        raise SourceError(f"{problem}, which is not a number") from None


def _absent(column: str, missing: Missing) -> Drop | None:
    return Drop("nothing", f"a value in column '{column}'") if missing == "drop" else None


_OF_DOCUMENTS: dict[type, Callable[..., Drop | None]] = {
    LengthFilter: _length,
    AlphabeticFilter: _alphabetic,
    RepeatedLinesFilter: _repeated_lines,
    ScoreFilter: _score,
    SampleFilter: _sample,
    LicenseFilter: _license,
    ToxicityFilter: _toxicity,
}
"""The filters that read nothing but documents."""
