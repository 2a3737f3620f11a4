"""What a comparison of tokenizers may state, and the names of its metrics."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from specs.stages.evaluate_tokenizers import EvaluateTokenizersPart, EvaluateTokenizersStage

STAGE: dict[str, Any] = {
    "kind": "evaluate_tokenizers",
    "tokenizers": {"own": "tokenizer", "theirs": {"path": "/models/theirs"}},
    "sources": ["flores"],
    "parity_to": "en",
}


def test_a_tokenizer_is_a_stage_or_a_folder() -> None:
    found = EvaluateTokenizersStage.model_validate(STAGE).tokenizers
    assert str(found["own"].stage) == "tokenizer" and found["own"].path is None
    assert found["theirs"].stage is None and found["theirs"].path == "/models/theirs"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"tokenizers": {}}, "at least 1 item"),
        ({"tokenizers": {"a/b": "tokenizer"}}, "should match pattern"),
        ({"tokenizers": {"a": {}}}, "name either a tokenizer stage, or the path"),
        ({"tokenizers": {"a": {"stage": "t", "path": "p"}}}, "name either a tokenizer stage, or the path"),
        ({"against": "their"}, "there is no tokenizer 'their'; did you mean 'theirs'"),
        ({"languages": ["de", "en", "de"]}, "languages names 'de' twice"),
        ({"languages": ["de", "eng"]}, "parity_to 'en' is not among the languages; did you mean 'eng'"),
        ({"lines": 1}, "greater than or equal to 2"),
    ],
)
def test_what_cannot_be_compared_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        EvaluateTokenizersStage.model_validate(STAGE | fields)


def test_a_difference_is_to_another_tokenizer() -> None:
    names = set(EvaluateTokenizersPart(parity_to="en", against="a", seed=0).metrics(["a", "b"], ["de", "en"]))
    assert {"a/parity/de", "a/parity/de/low", "b/gini/high", "b/difference/gini/low"} <= names
    assert {"a/vocabulary_used", "b/changed_lines"} <= names
    assert not any(name.startswith("a/difference") for name in names)
    assert not {"a/vocabulary_used/low", "a/gini/de", "b/difference/parity/de"} & names
