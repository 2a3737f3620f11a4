from __future__ import annotations

from typing import Any

import pytest

from infra.store import Artifact, Attempt
from specs.errors import StageError


def _corpus(bench: Any, fingerprint: str, *, tokenizer: str = "tokenizer0", tokens: int = 100) -> Artifact:
    job = bench.job("corpus", fingerprint)
    facts = {"tokenizer": tokenizer, "vocab_size": 512, "bos_id": 1, "eos_id": 2, "train": ["train-00000"]}
    Attempt(job).commit(metrics={"train": {"tokens": tokens, "documents": 7}}, facts=facts)
    return Artifact(bench.store, job.path)


def _weights(mixture: Artifact) -> dict[str, int]:
    return {source["fingerprint"]: source["weight"] for source in mixture.json("recipe.json")["sources"]}


def test_the_recipe_lists_the_corpora_in_the_order_of_their_fingerprints(bench: Any) -> None:
    inputs = {"source:0": _corpus(bench, "bb", tokens=50), "source:1": _corpus(bench, "aa", tokens=100)}
    mixture = bench.run("mixture", "m", {"weights": [3, 7], "seed": 5}, inputs)
    assert mixture.json("recipe.json") == {
        "format": 2,
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
    assert mixture.manifest.metrics == {"sources": 2, "shares": [0.7, 0.3], "tokens": 150}


def test_sources_are_drawn_in_proportion_to_their_tokens_times_their_factor(bench: Any) -> None:
    inputs = {
        f"source:{i}": _corpus(bench, name, tokens=n)
        for i, (name, n) in enumerate([("aa", 4815), ("bb", 3557), ("cc", 235)])
    }
    plain = bench.run("mixture", "m", {"weights": [1, 1, 1], "proportional": True, "seed": 5}, inputs)
    assert _weights(plain) == {"aa": 4815, "bb": 3557, "cc": 235}
    assert (
        _weights(bench.run("mixture", "n", {"weights": [1, 1, 2], "proportional": True, "seed": 5}, inputs))[
            "cc"
        ]
        == 470
    )


def test_a_mixture_of_a_mixture_shares_its_weight_out_exactly(bench: Any) -> None:
    web, code, math = (_corpus(bench, name, tokens=100) for name in ("aa", "bb", "cc"))
    inner = bench.run("mixture", "inner", {"weights": [1, 2], "seed": 5}, {"source:0": web, "source:1": code})
    outer = bench.run(
        "mixture", "outer", {"weights": [7, 3], "seed": 6}, {"source:0": inner, "source:1": math}
    )
    assert _weights(outer) == {"aa": 7, "bb": 14, "cc": 9}
    # A corpus that is named on two ways is one source: 1/2 of (7/30, 14/30, 9/30), and 1/2 of code.
    whole = bench.run(
        "mixture", "whole", {"weights": [1, 1], "seed": 6}, {"source:0": outer, "source:1": code}
    )
    assert _weights(whole) == {"aa": 7, "bb": 44, "cc": 9}


def test_learned_weights_are_millionths_by_position(bench: Any) -> None:
    job = bench.job("domain_weights", "d")
    facts = {"domain_weights": {"mean": [0.25, 0.0999999, 0.65, 1e-9]}}
    Attempt(job).commit(metrics={}, facts=facts)
    inputs = {f"source:{index}": _corpus(bench, name) for index, name in enumerate(("aa", "bb", "cc"))}
    spec = {"weights": [1, 1, 1], "learned": [2, 0, 3], "seed": 5}
    mixture = bench.run("mixture", "m", spec, inputs | {"learned": Artifact(bench.store, job.path)})
    assert _weights(mixture) == {"aa": 650_000, "bb": 250_000, "cc": 1}


def test_corpora_of_different_tokenizers_are_refused(bench: Any) -> None:
    inputs = {"source:0": _corpus(bench, "aa"), "source:1": _corpus(bench, "bb", tokenizer="tokenizer1")}
    with pytest.raises(StageError, match="different tokenizers"):
        bench.run("mixture", "m", {"weights": [1, 1], "seed": 5}, inputs)
