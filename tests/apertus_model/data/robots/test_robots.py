"""The robots filter by snapshots, as a step of a corpus."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from apertus_model.data.corpora.filters import Drop
from infra.store.inputs import SourceError

Judge = Callable[..., Drop | None]


def test_documents_are_judged_by_their_address(judge: Judge, tmp_path: Path) -> None:
    text = "User-agent: GPTBot\nDisallow: /private\n"
    (tmp_path / "robots.jsonl").write_text(json.dumps({"url": "a.example", "text": text}) + "\n")
    spec = {"filter": "robots", "snapshots": [{"url": str(tmp_path / "robots.jsonl"), "format": "jsonl"}]}
    drop = judge(spec, url="https://a.example/private/1")
    assert drop is not None and drop.excluded is not None
    assert drop[:2] == (
        "a.example, closed to GPTBot",
        "open to all agents in https://a.example/robots.txt",
    )
    assert (drop.excluded.domain, drop.excluded.agents) == ("a.example", ("GPTBot",))
    assert judge({**spec, "agents": ["CCBot"]}, url="https://a.example/private/1") is None
    assert judge(spec, url="https://a.example/") is judge(spec, url="https://b.example/private") is None
    with pytest.raises(SourceError, match=r"has no host\. Fix: set missing: keep or drop"):
        judge(spec, url="https:///private")
    with pytest.raises(SourceError, match="nothing in column 'url'"):
        judge(spec)
    assert judge({**spec, "missing": "drop"}) == Drop("nothing", "a value in column 'url'")
