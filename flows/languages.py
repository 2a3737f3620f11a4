"""The largest languages of a corpus, as its metrics record them, and what became of their documents.

Invariant: metrics are external data. An entry of an unexpected form is left out, without an error.
"""

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

KEPT = "kept"  # as in `apertus_model.data.corpora.tallies`, which commands do not load


@dataclass(frozen=True)
class LanguageCounts:
    language: str  # "" for documents that state no language
    documents: int  # that were read
    removed: dict[str, int]  # documents, by the label of each filter, in order
    kept: int
    tokens: int  # of kept documents

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def languages_of(metrics: dict[str, Any]) -> list[LanguageCounts]:
    """The languages in the metrics of a corpus, those with the most documents read first."""
    filters, counts = metrics.get("filters"), _mapping(metrics.get("languages"))
    labels = dict.fromkeys(filters if isinstance(filters, list) else [])
    labels |= {label: None for outcomes in counts.values() for label in _mapping(outcomes) if label != KEPT}
    languages = [
        _language(name, outcomes, list(labels))
        for name, outcomes in counts.items()
        if isinstance(outcomes, dict)
    ]
    return sorted(languages, key=lambda language: (-language.documents, language.language))


def filters_of(languages: Iterable[LanguageCounts]) -> list[str]:
    """The labels of the filters that removed any documents, in order."""
    counts: dict[str, int] = {}
    for language in languages:
        for label, count in language.removed.items():
            counts[label] = counts.get(label, 0) + count
    return [label for label, count in counts.items() if count]


def _language(name: str, outcomes: dict[str, Any], labels: list[str]) -> LanguageCounts:
    removed = {label: _count(outcomes.get(label), "documents") for label in labels}
    kept, tokens = (_count(outcomes.get(KEPT), what) for what in ("documents", "tokens"))
    return LanguageCounts(name, kept + sum(removed.values()), removed, kept, tokens)


def _mapping(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _count(counts: Any, name: str) -> int:
    value = _mapping(counts).get(name)
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else 0
