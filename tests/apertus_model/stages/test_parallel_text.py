"""Parallel text as an artifact."""

from __future__ import annotations

from apertus_model.data.rows import Rows
from infra.store import Artifact
from tests.apertus_model.stages.conftest import PARALLEL


def test_lines_are_stored_with_their_languages_and_whether_these_have_words(text: Artifact) -> None:
    facts, metrics = text.manifest.facts, text.manifest.metrics
    assert (facts["languages"], facts["with_words"]) == (["de", "en", "ja"], ["de", "en"])
    assert (metrics["lines"], metrics["languages"], metrics["left_out"]) == (3, 3, 0)
    assert metrics["bytes"]["ja"] == len("".join(PARALLEL["ja"]).encode())
    rows = [{"id": str(number + 1), "texts": {one: PARALLEL[one][number] for one in facts["languages"]}}
            for number in range(3)]  # fmt: skip
    assert list(Rows(text)) == rows
