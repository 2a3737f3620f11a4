"""How a source of a corpus is processed: what it reads, and which steps need text."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from specs.stages.corpus import CorpusSource, RepeatedProbes, needs_text

LANGUAGE = {"filter": "language", "model": "/lid.bin", "languages": ["de"]}
SCORE = {"filter": "score", "column": "quality", "min": 2}


def test_a_source_reads_the_columns_of_its_filters_but_not_what_an_earlier_one_adds() -> None:
    by_language = {"filter": "sample", "rate": 1, "rates": {"de": 0.5}, "by": "language"}
    score = CorpusSource.model_validate({"filters": [SCORE, by_language]})
    assert score.columns() == ["language", "quality"]
    told = CorpusSource.model_validate({"filters": [LANGUAGE, by_language, SCORE]})
    assert told.columns() == ["quality"]


def test_steps_that_need_text_are_named() -> None:
    assert needs_text(CorpusSource(pii=False, holdout=0.5, examples=False)) == []
    assert needs_text(CorpusSource()) == ["pii"]
    assert needs_text(CorpusSource.model_validate({"filters": [SCORE], "pii": True})) == ["filters", "pii"]


def test_a_bucket_of_probes_is_stated_once() -> None:
    with pytest.raises(ValidationError, match="2 is repeated; list it once"):
        RepeatedProbes(buckets=[0, 2, 2], per_bucket=1, length=8)


@pytest.mark.parametrize(
    ("step", "message"),
    [
        ({"filter": "length", "of": "answer"}, "a document has no answer; leave out `of` of length"),
    ],
)
def test_what_only_conversations_have_is_refused(step: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        CorpusSource.model_validate({"filters": [step]})
