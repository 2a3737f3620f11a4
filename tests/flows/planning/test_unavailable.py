"""Inputs that cannot be read while planning: where they lie, and the digest that stands in for theirs."""

from __future__ import annotations

import pytest

from flows.planning.unavailable import is_local, provisional
from specs.sources import SourceSpec


def test_the_provisional_digest_is_that_of_the_place_and_the_globs() -> None:
    source = SourceSpec(url="s3://bucket/a", format="text")
    digest = provisional(source)
    assert digest.startswith("declared:") and digest == provisional(source)
    assert digest == provisional(source.model_copy(update={"license": "CC0-1.0"}))
    for other in ({"url": "s3://bucket/b"}, {"include": ["*.txt"]}, {"exclude": ["b/*"]}):
        assert provisional(source.model_copy(update=other)) != digest


@pytest.mark.parametrize(
    ("url", "local"),
    [
        ("/data", True),
        ("relative/folder", True),
        ("file:///data", True),
        ("s3://bucket/a", False),
        ("hf://datasets/owner/name@main", False),
    ],
)
def test_only_files_of_this_machine_are_listed_without_the_network(url: str, local: bool) -> None:
    assert is_local(url) is local
