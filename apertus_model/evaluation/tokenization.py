"""Tokenizers compared by their counts of tokens on parallel text, with intervals.

Invariants: a measure of a language is a ratio of sums over its lines, a measure over languages the mean of
the languages' ratios, so each language counts equally, however long its text is. The bootstrap draws lines,
the same for all languages and tokenizers: a difference of two tokenizers has an interval of its own, and
equal tokenizers differ by exactly 0. Sums are of integers, so their order does not matter.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from apertus_model.evaluation.paired import CHUNK, LEVEL, RESAMPLES
from specs.tokenizer_comparison import Comparison, Estimate, Language, TokenizerResult

Counts = Mapping[str, NDArray[np.int64]]
"""A column of counts for each language, (lines,)."""
Draws = NDArray[np.float64]
"""A value for all lines as they are, then one for each resample: (1 + RESAMPLES,), or with languages in
columns."""


@dataclass(frozen=True)
class Text:
    """Sizes of the lines of parallel text."""

    bytes: Counts
    words: Counts  # of the languages that have spaces between words
    parity_to: str
    seed: int

    @property
    def languages(self) -> list[str]:
        return list(self.bytes)

    @property
    def lines(self) -> int:
        return len(self.bytes[self.parity_to])

    @cached_property
    def sums(self) -> tuple[Draws, Draws]:
        """The sums of bytes and of words, by language; NaN for the words of a language that has none."""
        words = [self.words.get(language, np.zeros(self.lines, np.int64)) for language in self.languages]
        sums = resampled(np.stack([*self.bytes.values(), *words], axis=1), self.seed)
        of_words = sums[:, len(words) :]
        return sums[:, : len(words)], np.where(of_words > 0, of_words, np.nan)


def resampled(counts: NDArray[np.int64], seed: int) -> Draws:
    """(1 + RESAMPLES, columns): sums of columns over all lines, and over lines drawn with replacement."""
    random, lines = np.random.default_rng(seed), len(counts)
    values = counts.astype(np.float64)  # products of whole numbers, exact below 2^53
    sums = [values.sum(axis=0, keepdims=True)]
    at_once = max(1, CHUNK // lines)
    for begin in range(0, RESAMPLES, at_once):
        size = min(at_once, RESAMPLES - begin)
        drawn = random.integers(lines, size=(size, lines), dtype=np.int32)
        drawn += np.arange(size, dtype=np.int32)[:, None] * lines
        times = np.bincount(drawn.ravel(), minlength=size * lines).reshape(size, lines)
        sums.append(times.astype(np.float64) @ values)
    return np.concatenate(sums)


def gini(values: Draws) -> Draws:
    """The Gini coefficient of the last axis: the mean absolute difference of values, by twice the mean."""
    count = values.shape[-1]
    ranks = 2 * np.arange(1, count + 1) - count - 1
    ordered = np.sort(values, axis=-1)
    return (ordered * ranks).sum(axis=-1) / (count * values.sum(axis=-1))


@dataclass(frozen=True)
class Measured:
    """The measures of a tokenizer in all draws."""

    of_language: dict[str, Draws]  # (1 + RESAMPLES, languages)
    over_languages: dict[str, Draws]  # (1 + RESAMPLES,)


def measure(text: Text, counted: Counted) -> Measured:
    """The measures of a tokenizer, which do not depend on other tokenizers."""
    names = ("tokens", "whole_words")
    columns = [counted.columns[language][name] for name in names for language in text.languages]
    sums = resampled(np.stack(columns, axis=1), text.seed)
    of_tokens, of_whole = np.split(sums, 2, axis=1)
    of_bytes, of_words = text.sums
    of_language = {
        "tokens_per_line": of_tokens / text.lines,
        "tokens_per_byte": of_tokens / of_bytes,
        "tokens_per_word": of_tokens / of_words,
        "whole_words": of_whole / of_words,
        "parity": of_tokens / of_tokens[:, [text.languages.index(text.parity_to)]],
    }
    over = {name: _mean(draws) for name, draws in of_language.items()}
    over |= {
        "lines_per_token": (text.lines / of_tokens).mean(axis=1),
        "bytes_per_token": (of_bytes / of_tokens).mean(axis=1),
        "gini": gini(of_language["tokens_per_line"]),
    }
    return Measured(of_language, {name: draws for name, draws in over.items() if np.isfinite(draws).all()})


def _mean(draws: Draws) -> Draws:
    """The mean over the languages that have the measure; NaN if none has it."""
    measured = draws[:, np.isfinite(draws).all(axis=0)]
    return measured.sum(axis=1) / (measured.shape[1] or np.nan)


@dataclass(frozen=True)
class Counted:
    """The counts of one tokenizer."""

    columns: Mapping[str, Mapping[str, NDArray[np.int64]]]  # of each language (`token_counts.read_counts`)
    vocabulary: dict[str, int | float]  # its size, and measures of it


def compare(text: Text, tokenizers: Mapping[str, Counted], against: str) -> Comparison:
    """Compares all tokenizers, in the order of their names."""
    baseline = measure(text, tokenizers[against])
    results = {}
    for name in sorted(tokenizers):
        other = None if name == against else baseline
        own = baseline if other is None else measure(text, tokenizers[name])
        results[name] = _result(text, tokenizers[name], own, other)
    return Comparison(
        lines=text.lines,
        languages=text.languages,
        without_words=[language for language in text.languages if language not in text.words],
        parity_to=text.parity_to,
        against=against,
        tokenizers=results,
    )


def _result(text: Text, counted: Counted, own: Measured, other: Measured | None) -> TokenizerResult:
    """The result of one tokenizer. `other`: the measures of `against`; None for that tokenizer itself."""
    of_languages: dict[str, Draws] = {}
    over: dict[str, Draws] = {}
    if other is not None:
        of_languages = {name: draws - other.of_language[name] for name, draws in own.of_language.items()}
        over = {name: draws - other.over_languages[name] for name, draws in own.over_languages.items()}
    return TokenizerResult(
        vocabulary=counted.vocabulary,
        measures={name: _estimate(draws) for name, draws in own.over_languages.items()},
        difference={name: _estimate(draws) for name, draws in over.items()},
        languages={
            language: Language(
                measures=_estimates(own.of_language, index),
                difference=_estimates(of_languages, index),
                unknown_tokens=int(counted.columns[language]["unknown"].sum()),
                changed_lines=int((counted.columns[language]["restored"] == 0).sum()),
            )
            for index, language in enumerate(text.languages)
        },
    )


def _estimates(measured: Mapping[str, Draws], language: int) -> dict[str, Estimate | None]:
    of_language = {name: draws[:, language] for name, draws in measured.items()}
    return {
        name: _estimate(draws) if np.isfinite(draws).all() else None for name, draws in of_language.items()
    }


def _estimate(draws: Draws) -> Estimate:
    low, high = np.quantile(draws[1:], [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Estimate(value=float(draws[0]), low=float(low), high=float(high))
