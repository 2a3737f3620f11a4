"""A corpus of sixty documents, and words as datatrove asks for them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from datatrove.utils.word_tokenizers import WordTokenizer

from apertus_model.data.corpora.words import split
from apertus_model.data.tokens.megatron import TokenFile
from infra.store import Artifact


def corpus_spec(documents: Path, files_per_task: int = 7, **process: Any) -> dict[str, Any]:
    return {
        "source": {"url": str(documents), "format": "text", "include": ["*.txt"]},
        "process": {"holdout": 0.2, **process},
        "seed": 28,
        "files_per_task": files_per_task,
    }


def tokens_of(corpus: Artifact, split: str) -> list[list[int]]:
    file = TokenFile(corpus.local(f"{split}-00000.bin"))
    return [file[i].tolist() for i in range(len(file))]


class Words(WordTokenizer):
    """The words of `split` as the tokenizer that datatrove's steps ask for."""

    def word_tokenize(self, text: str) -> list[str]:
        return list(split(text))

    def sent_tokenize(self, text: str) -> list[str]:
        raise AssertionError("signatures are of words")

    def span_tokenize(self, text: str) -> list[tuple[int, int]]:
        raise AssertionError("signatures are of words")
