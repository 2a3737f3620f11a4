"""What filters may state, and their published defaults."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import TypeAdapter

from specs.base import encode
from specs.filters import FilterSpec
from specs.stages.corpus import CorpusSource


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"filter": "score", "column": "x"}, "keeps everything"),
        ({"filter": "score", "column": "x", "min": 1, "by": "language"}, "go together"),
        ({"filter": "sample", "rate": 0.5, "rates": {"de": 1}}, "go together"),
        ({"filter": "robots", "domains": "s3://key:secret@bucket/x"}, "credentials"),
        ({"filter": "robots"}, "snapshots.*or `domains`"),
        (
            {"filter": "robots", "domains": "x", "snapshots": [{"url": "y", "format": "warc"}]},
            "set either",
        ),
        ({"filter": "robots", "domains": "x", "errors": "drop"}, "errors belongs to snapshots"),
        ({"filter": "robots", "domains": "x", "agents": ["two words"]}, "agents"),
        ({"filter": "length", "cutoffs": {"zho": 50}}, "go together"),
        (
            {"filter": "length", "max_characters": 9, "by": "l", "cutoffs": {"zho": 10}},
            "at least 10 and at most 9",
        ),
        (
            {"filter": "length", "min_characters": 1234567, "max_characters": 10},
            "at least 1234567 and at most 10 characters",
        ),
        (
            {"filter": "language", "model": "x", "languages": ["deu"], "min_scores": {"fra": 0.5}},
            "min_scores names 'fra', which languages does not list",
        ),
        ({"filter": "language", "model": "x", "languages": []}, "languages"),
        ({"filter": "license", "allow": ["MIT"], "only": {"language": []}}, "only"),
        ({"filter": "exact-duplicates", "only": {"language": ["deu"]}}, "only"),
        ({"filter": "decontaminate", "against": [{"url": "x", "format": "chat"}]}, "read as conversations"),
        (
            {"filter": "decontaminate", "against": [{"url": "x", "format": "jsonl"}], "ngram": 4},
            "more than an n-gram of 4",
        ),
    ],
)
def test_impossible_filter_is_refused(spec: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TypeAdapter(FilterSpec).validate_python(spec)


def test_fields_at_their_neutral_value_have_no_identity() -> None:
    """Fingerprints of recipes that were written before these fields existed."""
    read = TypeAdapter(FilterSpec).validate_python
    for stated, expected in (
        ({"filter": "length", "min_characters": 5}, {"max_characters": None}),
        ({"filter": "alphabetic", "min_share": 0.5}, {}),
        ({"filter": "license", "allow": ["MIT"]}, {}),
        ({"filter": "robots", "agents": ["CCBot"], "domains": "x"}, {}),
        ({"filter": "language", "languages": ["deu"], "model": "x"}, {"min_score": 0.65}),
    ):
        identity = {name: value for name, value in stated.items() if name not in ("domains", "model")}
        assert encode(read(stated)) == identity | expected


def test_a_limited_filter_reads_the_columns_that_limit_it() -> None:
    filters = [
        {"filter": "length", "only": {"language": ["deu"]}, "by": "script", "cutoffs": {"Hani": 50}},
        {"filter": "license", "allow": ["MIT"], "only": {"source": ["a", "b"]}},
    ]
    process = CorpusSource.model_validate({"filters": filters})
    assert process.columns() == ["language", "license", "script", "source"]
    assert encode(process.filters[1])["only"] == {"source": ["a", "b"]}
