"""Shares of a mixture, as asked for and as drawn."""

from __future__ import annotations

from flows.planning.plan import Plan
from tests.flows.inspection.looking import look


def test_a_mixture_shows_asked_and_realised_shares_within_the_bound(built: Plan) -> None:
    found, text = look(built, "main", samples=1000)
    (source,) = found["sources"]
    assert (source["source"], source["share"], source["drawn"], source["off_by"]) == (
        "corpus/notes",
        1.0,
        1000,
        0.0,
    )
    assert source["bound"] == 0
    assert {use["stage"] for use in source["uses"]} >= {"pretrain", "cooldown"}
    assert "corpus/notes" in text
    assert "passes, at the end of a stage" in text and "cooldown" in text
