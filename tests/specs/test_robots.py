"""Snapshots of robots.txt as a recipe states them."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from specs.robots import ROBOTS_AGENTS, RobotsSource


def test_the_default_agents_are_the_published_ones() -> None:
    published = (
        "GPTBot, CCBot, ClaudeBot, Google-Extended, Bytespider, Applebot-Extended, Diffbot,"
        " Meta-ExternalAgent, AI2Bot, "
    )
    published += "cohere-training-data-crawler, PanguBot, *"
    assert set(published.split(", ")) <= set(ROBOTS_AGENTS)


def test_a_row_is_read_as_a_document_whose_text_is_the_address() -> None:
    source = RobotsSource(url="x", format="parquet", text_column="content", status_column="status")
    files = source.files
    assert (files.text_column, files.metadata, files.include) == (
        "url",
        ["content", "status"],
        ["**/*.parquet"],
    )
    assert RobotsSource(url="x", format="warc").files.include == ["**/*.warc", "**/*.warc.*"]


def test_where_the_files_lie_is_no_identity() -> None:
    one, other = (RobotsSource(url=url, format="jsonl", include=["*"]) for url in "ab")
    assert one.identity_fields() == other.identity_fields() == {"format": "jsonl"}
    dated = RobotsSource(url="a", format="jsonl", date_column="date")
    assert dated.identity_fields() == {"format": "jsonl", "date_column": "date"}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"format": "text"}, "format"),
        ({"format": "warc", "url_column": "url"}, "url_column belongs to jsonl and parquet and arrow"),
        ({"format": "jsonl", "text_column": "url"}, "are 'url'; name each column once"),
        ({"format": "jsonl", "url": "s3://key:secret@bucket/x"}, "credentials"),
    ],
)
def test_impossible_snapshot_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        RobotsSource.model_validate({"url": "x", **fields})
