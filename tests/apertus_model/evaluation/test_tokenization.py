"""Measures of tokenizers beside their formulas, and intervals beside draws of single lines."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from apertus_model.evaluation.paired import RESAMPLES
from apertus_model.evaluation.tokenization import Counted, Counts, Text, compare, gini, resampled
from specs.stages.evaluate_tokenizers import OF_VOCABULARY, EvaluateTokenizersPart

RANDOM = np.random.default_rng(0)
LINES = 12
LANGUAGES = ["de", "en", "ja"]
TEXT = Text(
    bytes={one: RANDOM.integers(20, 90, LINES) for one in LANGUAGES},
    words={one: RANDOM.integers(3, 9, LINES) for one in ("de", "en")},
    parity_to="en",
    seed=5,
)


def counted(low: int, high: int) -> Counted:
    columns = {
        one: {
            "tokens": RANDOM.integers(low, high, LINES),
            "whole_words": RANDOM.integers(0, 3, LINES),
            "unknown": np.arange(LINES),
            "restored": np.arange(LINES) % 2,
        }
        for one in LANGUAGES
    }
    return Counted(columns, dict.fromkeys(("vocabulary", *OF_VOCABULARY), 1.0))


def column(tokenizer: Counted, name: str) -> Counts:
    return {language: columns[name] for language, columns in tokenizer.columns.items()}


TOKENIZERS = {"short": counted(5, 20), "long": counted(10, 40)}
FOUND = compare(TEXT, TOKENIZERS, "long")


def sums(counts: dict[str, NDArray[np.int64]], lines: NDArray[np.int64]) -> dict[str, float]:
    return {one: float(sum(int(column[line]) for line in lines)) for one, column in counts.items()}


def by_hand(tokenizer: Counted, lines: NDArray[np.int64]) -> dict[str, float]:
    """The measures of some lines, by their formulas."""
    tokens, whole = sums(column(tokenizer, "tokens"), lines), sums(column(tokenizer, "whole_words"), lines)  # type: ignore[arg-type]
    size, words = sums(TEXT.bytes, lines), sums(TEXT.words, lines)  # type: ignore[arg-type]
    cost = [tokens[one] / LINES for one in LANGUAGES]
    pairs = sum(abs(a - b) for a in cost for b in cost)
    return {
        "tokens_per_line": sum(cost) / 3,
        "tokens_per_byte": sum(tokens[one] / size[one] for one in LANGUAGES) / 3,
        "tokens_per_word": sum(tokens[one] / words[one] for one in words) / 2,
        "whole_words": sum(whole[one] / words[one] for one in words) / 2,
        "parity": sum(tokens[one] / tokens["en"] for one in LANGUAGES) / 3,
        "lines_per_token": sum(LINES / tokens[one] for one in LANGUAGES) / 3,
        "bytes_per_token": sum(size[one] / tokens[one] for one in LANGUAGES) / 3,
        "gini": pairs / (2 * 3**2 * (sum(cost) / 3)),
    }


def test_measures_are_their_formulas() -> None:
    for name, result in FOUND.tokenizers.items():
        own = {measure: estimate.value for measure, estimate in result.measures.items()}
        assert own == pytest.approx(by_hand(TOKENIZERS[name], np.arange(LINES)), rel=1e-12)
    german = FOUND.tokenizers["short"].languages["de"]
    tokens = column(TOKENIZERS["short"], "tokens")
    assert german.measures["parity"] is not None
    assert german.measures["parity"].value == pytest.approx(tokens["de"].sum() / tokens["en"].sum())
    assert (german.unknown_tokens, german.changed_lines) == (66, 6)


def test_intervals_are_quantiles_over_the_same_drawn_lines_for_both_tokenizers() -> None:
    drawn = np.random.default_rng(TEXT.seed).integers(LINES, size=(RESAMPLES, LINES), dtype=np.int32)
    some = drawn[:400]  # of which the rows are compared one by one
    tokens = np.stack([column(TOKENIZERS["short"], "tokens")[one] for one in LANGUAGES], axis=1)
    assert np.array_equal(resampled(tokens, TEXT.seed)[1:401], tokens[some].sum(axis=1))
    cost = {
        name: np.stack([column(counts, "tokens")[one][drawn].sum(axis=1) for one in LANGUAGES], axis=1)
        for name, counts in TOKENIZERS.items()
    }
    for measure, values in (
        ("parity", {name: sums / sums[:, [1]] for name, sums in cost.items()}),
        ("tokens_per_line", {name: sums / LINES for name, sums in cost.items()}),
    ):
        means = {name: column.mean(axis=1) for name, column in values.items()}
        short = FOUND.tokenizers["short"]
        for estimate, draws in (
            (short.measures[measure], means["short"]),
            (short.difference[measure], means["short"] - means["long"]),
            (short.languages["ja"].measures[measure], values["short"][:, 2]),
            (short.languages["ja"].difference[measure], values["short"][:, 2] - values["long"][:, 2]),
        ):
            assert estimate is not None
            assert (estimate.low, estimate.high) == pytest.approx(tuple(np.quantile(draws, [0.025, 0.975])))


def test_the_gini_coefficient_is_the_mean_difference_of_pairs() -> None:
    values = np.random.default_rng(1).random((4, 9))
    pairs = np.abs(values[:, :, None] - values[:, None, :]).sum(axis=(1, 2))
    assert gini(values) == pytest.approx(pairs / (2 * 81 * values.mean(axis=1)))
    assert gini(np.array([[3.0, 3.0, 3.0], [0.0, 0.0, 6.0]])).tolist() == [0.0, pytest.approx(2 / 3)]


def test_languages_without_spaces_have_no_measures_of_words() -> None:
    assert FOUND.without_words == ["ja"]
    for name in ("tokens_per_word", "whole_words"):
        assert FOUND.tokenizers["short"].languages["ja"].measures[name] is None
        assert FOUND.tokenizers["short"].languages["de"].measures[name] is not None


def test_metrics_are_those_that_a_plan_expects() -> None:
    part = EvaluateTokenizersPart(parity_to="en", against="long", seed=5)
    absent = {f"{name}/{one}/ja" for name in TOKENIZERS for one in ("tokens_per_word", "whole_words")}
    absent = {f"{name}{end}" for name in absent for end in ("", "/low", "/high")}
    vocabulary = {f"{name}/vocabulary" for name in TOKENIZERS}
    assert set(FOUND.metrics()) - vocabulary == set(part.metrics(TOKENIZERS, LANGUAGES)) - absent


def test_equal_tokenizers_do_not_differ_and_neither_order_nor_number_of_them_matters() -> None:
    same = compare(TEXT, {"b": TOKENIZERS["short"], "a": TOKENIZERS["short"]}, "a")
    difference = same.tokenizers["b"].difference
    assert {(one.value, one.low, one.high) for one in difference.values()} == {(0.0, 0.0, 0.0)}
    alone = compare(TEXT, {"short": TOKENIZERS["short"]}, "short")
    assert alone.tokenizers["short"].measures == FOUND.tokenizers["short"].measures
    assert compare(TEXT, dict(reversed(TOKENIZERS.items())), "long").model_dump() == FOUND.model_dump()


def test_text_without_words_has_the_other_measures() -> None:
    text = Text(bytes=TEXT.bytes, words={}, parity_to="en", seed=0)
    measures = compare(text, TOKENIZERS, "long").tokenizers["short"].measures
    assert "tokens_per_word" not in measures and "gini" in measures
