"""From counts to the comparison, of a trained tokenizer and its folder."""

from __future__ import annotations

from typing import Any

import pytest
from tokenizers import Tokenizer

from infra.store import Artifact
from infra.store.inputs import SourceError
from specs.tokenizer_comparison import Comparison
from tests.apertus_model.stages.conftest import PARALLEL

COMPARED = {"parity_to": "en", "against": "own", "seed": 0}


def test_a_trained_tokenizer_and_its_folder_are_compared(
    bench: Any, tokenizer: Artifact, text: Artifact
) -> None:
    folder = tokenizer.local("tokenizer.json").parent
    own = bench.run("token_counts", "own", {}, {"tokenizer": tokenizer, "text": text})
    copy = bench.run("token_counts", "copy", {"path": str(folder)}, {"text": text})
    inputs = {"text": text, "counts:own": own, "counts:copy": copy}
    artifact = bench.run("evaluate_tokenizers", "study", COMPARED, inputs)
    metrics = artifact.manifest.metrics
    opened = Tokenizer.from_file(str(tokenizer.local("tokenizer.json")))
    tokens = {
        language: sum(len(opened.encode(line, add_special_tokens=False).ids) for line in lines)
        for language, lines in PARALLEL.items()
    }
    for name in ("own", "copy"):
        for language, count in tokens.items():
            assert metrics[f"{name}/tokens_per_line/{language}"] == pytest.approx(count / 3)
            assert metrics[f"{name}/parity/{language}"] == pytest.approx(count / tokens["en"])
        assert metrics[f"{name}/tokens_per_word/de"] == pytest.approx(tokens["de"] / 11)
        assert f"{name}/tokens_per_word/ja" not in metrics
        assert metrics[f"{name}/parity/en/low"] == metrics[f"{name}/parity/en/high"] == 1
        assert metrics[f"{name}/changed_lines"] == metrics[f"{name}/unknown_tokens"] == 0
        used = {
            one
            for lines in PARALLEL.values()
            for line in lines
            for one in opened.encode(line, add_special_tokens=False).ids
        }
        assert metrics[f"{name}/vocabulary_used"] == len(used) / 512
    assert metrics["copy/difference/gini/low"] == metrics["copy/difference/gini/high"] == 0
    assert Comparison.model_validate(artifact.json("evaluation.json")).metrics().items() <= metrics.items()


def test_a_language_of_comparison_that_the_text_lacks_is_named(
    bench: Any, tokenizer: Artifact, text: Artifact
) -> None:
    own = bench.run("token_counts", "own", {}, {"tokenizer": tokenizer, "text": text})
    with pytest.raises(SourceError, match=r"the text has no language 'eng'\. Fix: did you mean 'en'\?"):
        bench.run(
            "evaluate_tokenizers", "study", COMPARED | {"parity_to": "eng"}, {"text": text, "counts:own": own}
        )
