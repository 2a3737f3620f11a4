"""Counts the tokens that a tokenizer makes of lines of parallel text, and measures its use of its vocabulary.

Invariants: counts are of the text alone: no special token is added. A word is text between white space; it is
whole when exactly one token covers any of its characters.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
from numpy.typing import NDArray
from tokenizers import Encoding, Tokenizer

from infra.store.inputs import SourceError

ORDER = 2.5
"""The order of the Rényi entropy (arXiv 2306.16842)."""
LINES_AT_ONCE = 1024
SCHEMA = pyarrow.schema(
    [
        ("language", pyarrow.string()),
        ("id", pyarrow.string()),  # of the line
        ("tokens", pyarrow.int64()),
        ("whole_words", pyarrow.int64()),
        ("unknown", pyarrow.int64()),  # unknown tokens
        ("restored", pyarrow.bool_()),  # whether decoding gives the line back
    ]
)
"""`counts.parquet`: a row for each line of each language, language by language."""
_WORD = re.compile(r"\S+")


@dataclass
class Counts:
    """Counts of all lines that were given to `add`."""

    tokenizer: Tokenizer
    columns: dict[str, list[Any]] = field(default_factory=lambda: {name: [] for name in SCHEMA.names})

    def __post_init__(self) -> None:
        vocabulary = self.tokenizer.get_vocab()
        self._unknown = _unknown_id(self.tokenizer)
        self._occurrences = np.zeros(1 + max(vocabulary.values(), default=0), np.int64)
        self.vocabulary = len(vocabulary)  # ids may have gaps, which no text can use

    def add(self, language: str, ids: Sequence[str], texts: Sequence[str]) -> None:
        """Counts the lines of one language. SourceError for a line of which the tokenizer makes no token."""
        for begin in range(0, len(texts), LINES_AT_ONCE):
            names, batch = (values[begin : begin + LINES_AT_ONCE] for values in (ids, texts))
            encoded = self.tokenizer.encode_batch(list(batch), add_special_tokens=False)
            tokens = [encoding.ids for encoding in encoded]
            decoded = self.tokenizer.decode_batch(tokens, skip_special_tokens=False)
            together = np.asarray(list(chain.from_iterable(tokens)), np.int64)
            self._occurrences += np.bincount(together, minlength=len(self._occurrences))
            for name, text, encoding, restored in zip(names, batch, encoded, decoded, strict=True):
                if not encoding.ids:
                    raise SourceError(
                        f"the tokenizer makes no token of line '{name}' in '{language}': it drops what it"
                        " does not know. Fix: leave this tokenizer out, or the language"
                    )
                whole, unknown = whole_words(text, encoding), encoding.ids.count(self._unknown)
                row = (language, name, len(encoding.ids), whole, unknown, restored == text)
                for column, value in zip(self.columns.values(), row, strict=True):
                    column.append(value)

    def of_vocabulary(self) -> dict[str, float]:
        """Measures over all text: `OF_VOCABULARY` of `specs.stages.evaluate_tokenizers`."""
        return {
            "vocabulary_used": int(np.count_nonzero(self._occurrences)) / self.vocabulary,
            "renyi_efficiency": renyi_efficiency(self._occurrences, self.vocabulary),
            "unknown_tokens": sum(self.columns["unknown"]),
            "changed_lines": self.columns["restored"].count(False),
        }

    @property
    def tokens(self) -> int:
        return int(self._occurrences.sum())

    def write(self, path: Path) -> None:
        """Writes `counts.parquet`."""
        pyarrow.parquet.write_table(pyarrow.table(self.columns, schema=SCHEMA), path, compression="zstd")


def read_counts(path: Path) -> dict[str, dict[str, NDArray[np.int64]]]:
    """Columns of `counts.parquet` by language: `{"de": {"tokens": (lines,), ...}}`."""
    table = pyarrow.parquet.read_table(path, schema=SCHEMA)
    languages = np.asarray(table["language"].to_pylist())
    numbers = {
        name: table[name].cast(pyarrow.int64()).to_numpy()
        for name in ("tokens", "whole_words", "unknown", "restored")
    }
    return {
        str(language): {name: column[languages == language] for name, column in numbers.items()}
        for language in dict.fromkeys(languages.tolist())
    }


def words(text: str) -> int:
    """The number of words of a line."""
    return len(_WORD.findall(text))


def whole_words(text: str, encoding: Encoding) -> int:
    """The number of words that are whole: one token covers them, and may cover other text too."""
    spans = np.asarray([match.span() for match in _WORD.finditer(text)], np.int64).reshape(-1, 2)
    tokens = np.asarray(encoding.offsets, np.int64).reshape(-1, 2)
    tokens = tokens[tokens[:, 0] < tokens[:, 1]]
    begun = np.searchsorted(np.sort(tokens[:, 0]), spans[:, 1], side="left")  # before the word's end
    ended = np.searchsorted(np.sort(tokens[:, 1]), spans[:, 0], side="right")  # before the word's start
    return int(np.count_nonzero(begun - ended == 1))


def renyi_efficiency(occurrences: NDArray[np.int64], vocabulary: int) -> float:
    """The Rényi entropy of tokens by their occurrences, relative to the logarithm of the size."""
    shares = occurrences[occurrences > 0] / occurrences.sum()
    entropy = float(np.log(np.sum(shares**ORDER)) / (1 - ORDER))
    return entropy / float(np.log(vocabulary))


def _unknown_id(tokenizer: Tokenizer) -> int:
    """The id that stands for text that the vocabulary cannot write; -1 if there is none."""
    model = json.loads(tokenizer.to_str())["model"]
    if isinstance(unk_id := model.get("unk_id"), int):  # in a unigram model
        return unk_id
    unknown = tokenizer.token_to_id(model["unk_token"]) if model.get("unk_token") else None
    return -1 if unknown is None else unknown
