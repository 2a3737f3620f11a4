"""Finds test questions in documents.

The rule of the Apertus report for its instruction data (swiss-ai/posttraining-data, 03-decontamination; after
Tülu 3, arXiv 2411.15124): a document and a question that share an n-gram are aligned (Ratcliff and Obershelp,
as difflib does it), and the matching blocks of at least `min_match` words are compared with the question's
length. Words (`words.py`) replace tokens, so every tokenizer has the same result.

datatrove's NGramsDecontFilter is not used: it drops a document for one common n-gram, whatever the rest of
the question, and builds its index with lighteval.
"""

from collections.abc import Iterator, Sequence
from difflib import SequenceMatcher
from functools import lru_cache

from apertus_model.data.corpora.words import words
from apertus_model.data.documents.readers import texts_of
from infra.store.inputs import SourceError
from specs.filters import DecontaminateFilter

Overlap = tuple[float, str]  # the share of a question's words that a document covers, and the question


class Contamination:
    """An index of questions by their n-grams. Memory: the questions, and about 100 bytes per word in them."""

    def __init__(self, questions: Sequence[str], ngram: int, min_match: int) -> None:
        self._ngram = ngram
        self._min_match = min_match
        self._questions: list[tuple[str, list[str]]] = []
        self._index: dict[int, dict[tuple[str, ...], list[int]]] = {}
        for question in sorted(set(questions)):
            split = words(question)
            size = min(ngram, len(split))
            grams = self._index.setdefault(size, {}) if size else {}
            for gram in set(_ngrams(split, size)):
                grams.setdefault(gram, []).append(len(self._questions))
            self._questions.append((question, split))

    def worst(self, text: str) -> Overlap | None:
        """The question that a document covers most, of those that share an n-gram with it, if one does."""
        split, hits = words(text), set[int]()
        for size, grams in self._index.items():
            for gram in set(_ngrams(split, size)):
                hits.update(grams.get(gram, ()))
        if not hits:
            return None
        matcher: SequenceMatcher[str] = SequenceMatcher(None, autojunk=False)
        matcher.set_seq2(split)
        overlaps = [self._overlap(matcher, hit) for hit in sorted(hits)]
        return max(overlaps, key=lambda overlap: overlap[0])

    def _overlap(self, matcher: SequenceMatcher[str], hit: int) -> Overlap:
        question, split = self._questions[hit]
        if len(split) <= self._ngram:  # found as a whole
            return 1.0, question
        matcher.set_seq1(split)
        matched = sum(block.size for block in matcher.get_matching_blocks() if block.size >= self._min_match)
        return matched / len(split), question


def _ngrams(split: list[str], size: int) -> Iterator[tuple[str, ...]]:
    return (tuple(split[start : start + size]) for start in range(len(split) - size + 1))


@lru_cache(maxsize=4)
def load_questions(spec: str) -> Contamination:
    """Reads the questions of a filter, given as JSON, once per process. SourceError when there are none."""
    parsed = DecontaminateFilter.model_validate_json(spec)
    questions = [question for source in parsed.against for question in texts_of(source)]
    if not questions:
        raise SourceError(
            f"there is no question in {', '.join(source.url for source in parsed.against)}."
            " Fix: correct the files of `against`"
        )
    return Contamination(questions, parsed.ngram, parsed.min_match)
