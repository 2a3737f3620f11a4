"""The filters of a corpus as datatrove steps, one class per spec of `specs.sources`.

Invariant: a filter looks at one document and nothing else, so what is dropped does not depend on the order or the split of the work.
"""

from __future__ import annotations

import unicodedata

from datatrove.data import Document
from datatrove.pipeline.filters.base_filter import BaseFilter
from datatrove.pipeline.filters.gopher_repetition_filter import find_duplicates

from specs.sources import AlphabeticFilter, FilterSpec, LengthFilter, RepeatedLinesFilter


class Length(BaseFilter):
    """Keeps documents of `min_characters` to `max_characters` characters."""

    def __init__(self, spec: LengthFilter) -> None:
        self.name = spec.filter
        super().__init__()
        self._least = spec.min_characters
        self._most = spec.max_characters

    def filter(self, doc: Document) -> bool:
        return len(doc.text) >= self._least and (self._most is None or len(doc.text) <= self._most)


class Alphabetic(BaseFilter):
    """Keeps documents in which letters of any script, and white space, are at least `min_share` of the characters."""

    def __init__(self, spec: AlphabeticFilter) -> None:
        self.name = spec.filter
        super().__init__()
        self._share = spec.min_share

    def filter(self, doc: Document) -> bool:
        # Combining marks belong to the letters of many scripts, but `isalpha` does not count them.
        plain = sum(character.isalpha() or character.isspace() or _is_mark(character) for character in doc.text)
        return plain >= self._share * len(doc.text)


class RepeatedLines(BaseFilter):
    """Keeps documents in which lines that occurred before hold at most `max_share` of the characters (Gopher, arXiv 2112.11446,
    table A1)."""

    def __init__(self, spec: RepeatedLinesFilter) -> None:
        self.name = spec.filter
        super().__init__()
        self._share = spec.max_share

    def filter(self, doc: Document) -> bool:
        _, repeated = find_duplicates([line for line in doc.text.splitlines() if line.strip()])
        return repeated <= self._share * len(doc.text)


def make_filter(spec: FilterSpec) -> BaseFilter:
    """The step of a filter's spec; its `name` is the name that drops are counted under."""
    match spec:
        case LengthFilter():
            return Length(spec)
        case AlphabeticFilter():
            return Alphabetic(spec)
        case RepeatedLinesFilter():
            return RepeatedLines(spec)


def _is_mark(character: str) -> bool:
    return unicodedata.category(character)[0] == "M"
