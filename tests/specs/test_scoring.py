"""What scores documents is stated once, and thresholds are numbers or names of stored ones."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from specs.filters import ScoreFilter, scored
from specs.scoring import ScoreModel, percentile_name
from specs.stages.corpus import CorpusSource

STAGE = {"from": "quality", "label": "good"}


def test_percentiles_are_named_without_needless_zeros() -> None:
    assert [percentile_name(value) for value in (90.0, 97.5)] == ["p90", "p97.5"]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"label": "a"}, "set from or url"),
        ({**STAGE, "url": "folder"}, "set from or url"),
        ({**STAGE, "max_tokens": 9}, "max_tokens belongs to a folder"),
        ({"url": "lid.bin", "label": "a", "max_tokens": 9}, "max_tokens belongs to a folder"),
        ({"url": "installed:no_such", "label": "a"}, "no installed package"),
        ({**STAGE, "label": "two words"}, "should match pattern"),
    ],
)
def test_a_model_that_is_not_one_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        ScoreModel.model_validate(fields)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"min": 1}, "needs a column with the score, or a model"),
        ({"column": "stars"}, "keeps everything"),
        ({"column": "stars", "min": "p90"}, "p90 is a threshold that a classifier stage has stored"),
        ({"model": {"url": "a.bin", "label": "a"}, "max": "p90"}, "p90 is a threshold"),
        ({"model": STAGE, "max": "95%"}, "should match pattern"),
        ({"model": STAGE, "min": 1, "by": "language"}, "go together"),
        ({"model": STAGE, "max": "p9", "by": "l", "ceilings": {"de": 1}}, "leave out other cut-offs"),
        ({"column": "s", "by": "l", "cutoffs": {"de": 2}, "ceilings": {"de": 1}}, "at least 2 and at most 1"),
        ({"column": "s", "by": "l", "max": 1, "cutoffs": {"de": 2}}, "at least 2 and at most 1"),
    ],
)
def test_a_score_filter_that_cannot_work_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        ScoreFilter.model_validate({"filter": "score", **fields})


def test_a_model_is_no_part_of_the_identity_of_a_filter_and_makes_its_column() -> None:
    chosen = ScoreFilter.model_validate({"filter": "score", "model": STAGE, "max": "p95", "by": "language"})
    assert "model" not in chosen.identity_fields() and chosen.percentiles == ["p95"]
    later = ScoreFilter(filter="score", column="score", min=0.5)
    assert CorpusSource(filters=[chosen, later]).columns() == ["language"]
    assert CorpusSource(filters=[later, chosen]).columns() == ["language", "score"]
    assert scored([later, chosen]) == {1: chosen}
