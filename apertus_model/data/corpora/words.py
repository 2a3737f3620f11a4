"""Text as words, for comparisons of documents.

Invariant: the words of a text do not depend on its language, and need no model: white space separates them
after datatrove's normalisation; in scripts without spaces each character is a word.
"""

import re
import sys
import unicodedata
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import cache

from datatrove.utils.text import TextNormConfig, simplify_text

# Blocks of scripts that put no spaces between words: those of South East Asia, Chinese, Japanese, Yi.
_UNSPACED = "".join(
    (
        "\u0e00-\u0fff\u1000-\u109f\u1780-\u17ff",  # Thai, Lao, Tibetan, Burmese, Khmer
        "\u1950-\u19ff\u1a20-\u1aaf\U00011700-\U0001174f",  # Tai Le, New Tai Lue, Tai Tham, Ahom
        "\u1b00-\u1b7f\ua980-\ua9ff\uaa60-\uaadf",  # Balinese, Javanese, more Burmese, Tai Viet
        "\u2e80-\u2fdf\u3005-\u3007\u3040-\u312f\u31a0-\u31bf\u31f0-\u31ff",  # radicals, 々, kana, bopomofo
        "\u3400-\u4dbf\u4e00-\u9fff\ua000-\ua4cf\uf900-\ufaff",  # Chinese characters, Yi
        "\uff66-\uff9f\U0001b000-\U0001b16f\U00020000-\U0003ffff",  # half-width and historic kana
    )
)
_WORD = re.compile(f"[{_UNSPACED}]|[^\\s{_UNSPACED}]+")
_UNSPACED_LETTER = re.compile(f"[{_UNSPACED}]")
_KEEP_NUMBERS = TextNormConfig(norm_numbers=False)


@cache
def _marks() -> frozenset[str]:
    """All diacritics, as characters separate from their letters."""
    every = map(chr, range(sys.maxunicode + 1))
    return frozenset(character for character in every if unicodedata.category(character) == "Mn")


def simplified(text: str, config: TextNormConfig) -> str:
    """The text after datatrove's normalisation. datatrove tests every character for being a diacritic, which
    takes most of its time; here each distinct character is tested once."""
    text = simplify_text(text, replace(config, norm_unicode_diacritics=False))
    if config.norm_unicode_diacritics and not text.isascii():
        text = unicodedata.normalize("NFD", text)
        for mark in _marks().intersection(set(text)):
            text = text.replace(mark, "")
    return text.strip()


def split(simple: str) -> Iterator[str]:
    """The words of a text that is already normalised."""
    return map(re.Match.group, _WORD.finditer(simple))


def has_spaces(texts: Iterable[str]) -> bool:
    """Whether white space separates words: at most half of the letters are of scripts without spaces."""
    letters = unspaced = 0
    for text in texts:
        letters += sum(map(str.isalpha, text))
        unspaced += sum(map(str.isalpha, _UNSPACED_LETTER.findall(text)))
    return 2 * unspaced <= letters


def words(text: str) -> list[str]:
    """The words of a text; numbers stay what they are (datatrove's default makes all of them 0)."""
    return list(split(simplified(text, _KEEP_NUMBERS)))
