"""Words, and characters of scripts without spaces."""

from __future__ import annotations

import unicodedata

from apertus_model.data.duplicates import MinHash
from apertus_model.data.words import has_spaces, words
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
