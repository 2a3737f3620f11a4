"""What filters may state, and their published defaults."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import TypeAdapter

from specs.filters import ROBOTS_AGENTS, FilterSpec


def test_the_default_agents_are_the_published_ones() -> None:
    published = (
        "GPTBot, CCBot, ClaudeBot, Google-Extended, Bytespider, Applebot-Extended, Diffbot,"
        " Meta-ExternalAgent, AI2Bot, "
    )
    published += "cohere-training-data-crawler, PanguBot, *"
    assert set(published.split(", ")) <= set(ROBOTS_AGENTS)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"filter": "score", "column": "x"}, "keeps everything"),
        ({"filter": "score", "column": "x", "min": 1, "by": "language"}, "go together"),
        ({"filter": "sample", "rate": 0.5, "rates": {"de": 1}}, "go together"),
        ({"filter": "robots", "domains": "s3://key:secret@bucket/x"}, "credentials"),
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
