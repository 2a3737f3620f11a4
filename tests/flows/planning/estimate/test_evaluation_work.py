"""What evaluations ask of a model, counted by hand."""

from __future__ import annotations

from typing import Any

from flows.planning.plan import Plan
from tests.flows.conftest import finish
from tests.flows.planning.estimate.test_sampling_work import (
    LAYERS,
    OUTPUT,
    SCORES,
    Chat,
    numbers,
    parts,
)


def test_evaluations_score_held_out_rows_and_continue_probes(chat: Chat) -> None:
    """Four rows of 32 tokens. Probes: two buckets of three, with 4 and 8 tokens given and 4 asked for, chosen
    and drawn."""
    plan = chat(
        "stages.corpus.sources.notes.repeats={buckets: [0, 2], per_bucket: 3, length: 12}",
        "stages.evaluate.memorisation={probes: corpus/notes, prefixes: [4, 8], suffix: 4, nucleus: {}}",
    )
    scored = 4 * 32 * (LAYERS + 32 * SCORES + OUTPUT)
    found = parts(plan, "evaluate")
    assert numbers(found["evaluate"]) == (4, 4 * 32, 0, scored, "at most")
    assert list(found) == ["greedy", "nucleus", "evaluate"]
    reads = sum(length * (LAYERS + length * SCORES) + OUTPUT for length in (4, 8))
    steps = 2 * 3 * (LAYERS + OUTPUT) + (5 + 6 + 7 + 9 + 10 + 11) * SCORES
    for decoding in ("greedy", "nucleus"):
        assert numbers(found[decoding]) == (12, 6 * (4 + 8), 12 * 4, 6 * (reads + steps), "declared")


def test_a_comparison_counts_both_models(chat: Chat) -> None:
    """64 rows of 128 held-out tokens, and eight answers of at most 112 + 16 tokens that both models read."""
    found = parts(chat(), "evaluate-qrpo")["evaluate-qrpo"]
    each = LAYERS + 128 * SCORES + OUTPUT
    assert numbers(found)[:4] == (64 + 8, 64 * 128 + 2 * 8 * 128, 0, (64 * 128 + 2 * 8 * 128) * each)


def test_tasks_are_counted_as_declared_or_as_a_sample_of_them_was(chat: Chat) -> None:
    def suite(*settings: str) -> Plan:
        tasks = ", ".join(("tasks: [stdlib_functions]", *settings))
        harness = f"{{include: installed:examples/tasks, suites: {{own: {{{tasks}}}}}}}"
        return chat(f"stages.evaluate.harness={harness}")

    def counted(*settings: str) -> dict[str, Any]:
        return parts(suite(*settings), "evaluate")["harness/own"]

    read = 20 * (LAYERS + 20 * SCORES + OUTPUT)
    steps = 9 * (LAYERS + OUTPUT) + sum(range(21, 30)) * SCORES
    found = counted("expected: {requests: 7, tokens: 20, new_tokens: 10}")
    assert numbers(found) == (7, 140, 70, 7 * (read + steps), "declared")
    assert counted()["flops"] is None and "expected" in counted()["not_counted"]
    assert "expected.tokens" in counted("expected: {requests: 7}")["not_counted"]
    sample = suite("limit: 2")
    asked = {"requests": 4, "read_tokens": 80, "sampled_tokens": 40}
    finish(sample, "evaluate/harness/own", facts={"asked": asked})
    assert numbers(counted("limit: 2")) == (4, 80, 40, 4 * (read + steps), "measured")
    assert counted("expected: {requests: 7}") | {"time_source": None} == found | {"time_source": None}


def test_a_suite_that_records_its_requests_in_another_form_is_counted_as_declared(chat: Chat) -> None:
    suite = "{tasks: [stdlib_functions], expected: {requests: 7, tokens: 20, new_tokens: 10}}"
    plan = chat(f"stages.evaluate.harness={{include: installed:examples/tasks, suites: {{own: {suite}}}}}")
    asked = {"requests": 4, "read_tokens": 80, "sampled": 40}
    finish(plan, "evaluate/harness/own", facts={"asked": asked})
    again = chat(f"stages.evaluate.harness={{include: installed:examples/tasks, suites: {{own: {suite}}}}}")
    assert numbers(parts(again, "evaluate")["harness/own"])[:3] == (7, 140, 70)
