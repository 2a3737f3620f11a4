"""Addresses, and what belongs to one robots.txt."""

from __future__ import annotations

import pytest

from apertus_model.data.documents.addresses import parse


@pytest.mark.parametrize(
    ("url", "origin", "path"),
    [
        ("https://example.org", "https://example.org", "/"),
        ("HTTPS://Example.ORG:443/a?b=c#d", "https://example.org", "/a?b=c"),
        ("http://example.org:443/", "http://example.org:443", "/"),
        ("http://user:secret@example.org.:80/a//b", "http://example.org", "/a//b"),
        ("https://MÜNCHEN.example/ü", "https://xn--mnchen-3ya.example", "/ü"),
        ("example.org/a//b?u=http://x", "https://example.org", "/a//b?u=http://x"),
        ("example.org:8080", "https://example.org:8080", "/"),
        ("//example.org/a", "https://example.org", "/a"),
        ("https://example.org?a", "https://example.org", "/?a"),
    ],
)
def test_origin_is_scheme_host_and_port(url: str, origin: str, path: str) -> None:
    address = parse(url)
    assert address is not None and (address.origin, address.path) == (origin, path)


@pytest.mark.parametrize(
    "url", ["", "not a host", "https:///path", "http://[1::2", "http://example.org:99999/"]
)
def test_text_without_a_host_is_no_address(url: str) -> None:
    assert parse(url) is None
