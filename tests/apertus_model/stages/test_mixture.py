from __future__ import annotations

from typing import Any

import pytest

from apertus_model.stages.mixture import MixtureError, exact_weights
from infra.store import Artifact, Attempt


def _corpus(bench: Any, fingerprint: str, *, tokenizer: str = "tokenizer0", tokens: int = 100) -> Artifact:
    job = bench.job("corpus", fingerprint, {}, {}, attempt="first", workers=1)
    facts = {"tokenizer": tokenizer, "vocab_size": 512, "bos_id": 1, "eos_id": 2, "train": ["train-00000"]}
    Attempt(job).commit(metrics={"train": {"tokens": tokens, "documents": 7}}, facts=facts)
    return Artifact(bench.store, job.path)


def test_the_recipe_lists_the_sources_in_the_order_of_the_inputs(bench: Any) -> None:
    inputs = {"source:0": _corpus(bench, "aa", tokens=100), "source:1": _corpus(bench, "bb", tokens=50)}
    mixture = bench.run("mixture", "m", {"weights": [0.7, 0.3], "seed": 5}, inputs)
    assert mixture.json("recipe.json") == {
        "format": 1,
        "seed": 5,
        "tokenizer": "tokenizer0",
        "vocab_size": 512,
        "bos_id": 1,
        "eos_id": 2,
        "sources": [
            {"fingerprint": "aa", "path": "corpus/aa", "weight": 7, "tokens": 100, "documents": 7},
            {"fingerprint": "bb", "path": "corpus/bb", "weight": 3, "tokens": 50, "documents": 7},
        ],
    }
    assert mixture.manifest["metrics"] == {"sources": 2, "shares": [0.7, 0.3], "tokens": 150}


def test_corpora_of_different_tokenizers_are_refused(bench: Any) -> None:
    inputs = {"source:0": _corpus(bench, "aa"), "source:1": _corpus(bench, "bb", tokenizer="tokenizer1")}
    with pytest.raises(MixtureError, match="different tokenizers"):
        bench.run("mixture", "m", {"weights": [1, 1], "seed": 5}, inputs)


@pytest.mark.parametrize(
    ("weights", "expected"), [([0.7, 0.2, 0.1], [7, 2, 1]), ([2.0, 4.0], [1, 2]), ([1e-06, 1.0], [1, 10**6]), ([0.333, 1.0], [333, 1000])]
)
def test_weights_are_what_is_written_in_decimal(weights: list[float], expected: list[int]) -> None:
    assert exact_weights(weights) == expected
