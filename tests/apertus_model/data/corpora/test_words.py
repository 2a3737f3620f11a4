"""Words, and characters of scripts without spaces."""

from __future__ import annotations

import unicodedata

import pytest
from datatrove.utils.text import TextNormConfig, simplify_text
from hypothesis import given
from hypothesis import strategies as st

from apertus_model.data.corpora.duplicates import MinHash
from apertus_model.data.corpora.words import has_spaces, simplified, words
from specs.filters import NearDuplicatesFilter


def _spec(**fields: int) -> NearDuplicatesFilter:
    return NearDuplicatesFilter(filter="near-duplicates", **fields)


def test_scripts_without_spaces_are_compared_by_character() -> None:
    minhash = MinHash(_spec(buckets=100, hashes_per_bucket=10))
    one, other = (
        "我们的语言模型在公开数据上训练而成并且可以重现",
        "我们的语言模型在公开数据上训练而成也可以被检查",
    )
    grams = [{text[i : i + 5] for i in range(len(text) - 4)} for text in (one, other)]
    exact = len(grams[0] & grams[1]) / len(grams[0] | grams[1])
    left, right = minhash.hashes(one), minhash.hashes(other)
    assert left is not None and right is not None
    assert abs(float((left == right).mean()) - exact) <= 4 * (exact * (1 - exact) / 1000) ** 0.5
    assert words("ภาษา and 日本語の text") == [c for c in "ภาษา" if unicodedata.category(c) != "Mn"] + [
        "and",
        *"日本語の",
        "text",
    ]


def test_a_language_has_spaces_unless_most_of_its_letters_are_of_scripts_without() -> None:
    assert has_spaces(["Open the file 東京"]) and has_spaces(["안녕하세요 여러분"]) and has_spaces(["123"])
    assert not has_spaces(["ファイルを open", "開く"]) and not has_spaces(["ภาษาไทย"])


@pytest.mark.parametrize(
    "text",
    [
        "ພາສາລາວ",  # Lao
        "မြန်မာ",  # Burmese
        "ភាសា",  # Khmer
        "ᥖᥭᥰ",  # Tai Le
        "ᦅᧄᦺ",  # New Tai Lue
        "ᨲᩫ᩠ᩅ",  # Tai Tham
        "ꪎꪗ",  # Tai Viet
        "ꦗꦮ",  # Javanese
        "ꆈꌠ",  # Yi
        "ﾃｽﾄ",  # half-width kana
        "ㄅㄆㄇ",  # bopomofo
        "々〇",
        "𠀋𪚲",  # Chinese characters beyond 16 bits
    ],
)
def test_each_letter_of_a_script_without_spaces_is_a_word(text: str) -> None:
    found = words(text)
    assert found == [letter for letter in text if unicodedata.category(letter) != "Mn"] and len(found) > 1


def test_scripts_with_spaces_are_split_at_them() -> None:
    for text in ("한국어 문장", "язык модели", "اللغة العربية", "ቋንቋ ሞዴል", "γλωσσικό μοντέλο", "tiếng Việt"):
        assert len(words(text)) == 2


@given(
    st.text(st.characters() | st.sampled_from("ÅéÉ 1٣.,\n\u2000\u0301\u3099ệ한ß!")),
    st.builds(TextNormConfig, st.booleans(), st.booleans(), st.booleans(), st.booleans(), st.booleans()),
)
def test_texts_are_normalised_as_datatrove_does(text: str, config: TextNormConfig) -> None:
    assert simplified(text, config) == simplify_text(text, config)
