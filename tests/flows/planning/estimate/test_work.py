"""Where the numbers of a part come from: what is stored, what is declared, or nothing."""

from __future__ import annotations

from tests.flows.conftest import finish
from tests.flows.planning.estimate.test_sampling_work import (
    DECLARED,
    EXPECTED,
    Chat,
    numbers,
    parts,
)
from tests.recipes import CLUSTER


def test_what_is_stored_wins_over_what_is_declared(chat: Chat) -> None:
    plan = chat(DECLARED, *EXPECTED)
    finish(plan, "preferences/prompts", metrics={"prompts": 30, "prompt_tokens": 450, "completions": 7})
    finish(plan, "preferences/completions", metrics={"mean_tokens": 5.0, "tokens": 600})
    found = parts(chat(DECLARED, *EXPECTED))["completions"]
    assert numbers(found)[:3] == (120, 120 * 15, 600) and found["tokens_source"] == "measured"
    # other completions, for which the prompts are made anew, take the mean lengths of the last run over
    found = parts(chat(DECLARED, *EXPECTED, "stages.preferences.completions.n=2"))["completions"]
    assert numbers(found)[:3] == (64, 64 * 15, 64 * 5)


def test_what_nothing_states_is_not_counted_and_named(chat: Chat) -> None:
    plan = chat(CLUSTER)
    found = parts(plan)
    unknown = "conversations of chat/questions"
    for name in ("completions", "log_probabilities"):
        assert numbers(found[name]) == (None,) * 5 and found[name]["not_counted"] == unknown
        assert found[name]["seconds"] is None
    totals = plan.estimates.totals()
    assert f"preferences/completions: {unknown}" in totals["not_counted"]
    assert totals["gpu_hours"] > 0
    # a limit bounds the prompts of the evaluation
    assert numbers(parts(plan, "evaluate-sft")["completions"])[0] == 8
