"""What a suite asked, from its answers."""

from __future__ import annotations

from apertus_model.evaluation.harness.answers import asked


def test_requests_and_tokens_are_counted_once_for_all_filters() -> None:
    choice = {"task": "a", "filter": "none", "prompts": ["q r", "q r"], "continuations": [" x", " y z"]}
    text = {"task": "b", "prompts": ["s"], "continuations": [], "answers": ["t u v"]}
    rows = [choice | {"answers": []}, text | {"filter": "strict"}, text | {"filter": "flexible"}]
    assert asked(rows, lambda words: [len(word) for word in words.split()]) == {
        "requests": 3,
        "read_tokens": 2 + 2 + 1 + 2 + 1,
        "sampled_tokens": 3,
    }
