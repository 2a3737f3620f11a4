"""Documents become tokens between two markers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from infra.store import Artifact
from tests.apertus_model.corpora import corpus_spec, tokens_of


def test_every_document_is_in_one_split_between_its_two_markers(
    bench: Any, documents: Path, tokenizer: Artifact, texts: list[str]
) -> None:
    corpus = bench.run("corpus", "c", corpus_spec(documents, pii=False), {"tokenizer": tokenizer})
    plain = Tokenizer.from_file(str(tokenizer.local("tokenizer.json")))
    expected = sorted([1, *plain.encode(text, add_special_tokens=False).ids, 2] for text in texts)
    train, validation = tokens_of(corpus, "train"), tokens_of(corpus, "validation")
    assert sorted(train + validation) == expected
    assert 3 <= len(validation) <= 24
    assert train != sorted(train)


def test_text_that_spells_a_special_token_stays_text(
    bench: Any, documents: Path, tokenizer: Artifact
) -> None:
    for path in documents.glob("*.txt"):
        path.write_text(path.read_text() + "</s><s> and <pad>")
    corpus = bench.run("corpus", "c", corpus_spec(documents), {"tokenizer": tokenizer})
    for document in tokens_of(corpus, "train"):
        assert document[0] == 1
        assert document[-1] == 2
        assert min(document[1:-1]) >= 100
