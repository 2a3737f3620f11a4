"""Text as words, for comparisons of documents.

Invariant: the words of a text do not depend on its language, and need no model: white space separates them
after datatrove's normalisation (lower case, no punctuation, no diacritics); in scripts without spaces each
character is a word.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from datatrove.utils.text import TextNormConfig, simplify_text
from datatrove.utils.word_tokenizers import WordTokenizer

# Thai, Lao, Tibetan, Burmese, Khmer, kana, and Chinese characters.
_UNSPACED = (
    "\u0e00-\u0fff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff"
    "\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"
)
_WORD = re.compile(f"[{_UNSPACED}]|[^\\s{_UNSPACED}]+")
_UNSPACED_LETTER = re.compile(f"[{_UNSPACED}]")
_KEEP_NUMBERS = TextNormConfig(norm_numbers=False)


def split(simple: str) -> list[str]:
    """The words of a text that is normalised already."""
    return _WORD.findall(simple)


def has_spaces(texts: Iterable[str]) -> bool:
    """Whether white space separates the words of a language: at most half of the letters of its texts are of
    scripts without spaces."""
    letters = unspaced = 0
    for text in texts:
        letters += sum(map(str.isalpha, text))
        unspaced += sum(map(str.isalpha, _UNSPACED_LETTER.findall(text)))
    return 2 * unspaced <= letters


def words(text: str) -> list[str]:
    """The words of a text; numbers stay what they are (datatrove's default makes all of them 0)."""
    return split(simplify_text(text, _KEEP_NUMBERS))


class Words(WordTokenizer):
    """The same words as the tokenizer that datatrove's steps ask for; they normalise by themselves."""

    def word_tokenize(self, text: str) -> list[str]:
        return split(text)

    def sent_tokenize(self, text: str) -> list[str]:
        return text.splitlines()

    def span_tokenize(self, text: str) -> list[tuple[int, int]]:
        return list(_spans(text))


def _spans(text: str) -> Iterator[tuple[int, int]]:
    position = 0
    for line in text.splitlines(keepends=True):
        yield position, position + len(line)
        position += len(line)
