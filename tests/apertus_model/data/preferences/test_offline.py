from __future__ import annotations

from apertus_model.data.preferences.choice import offline_completions

ONE, TWO, THREE = {"text": "one"}, {"text": "two"}, {"text": "three"}


def test_those_of_the_conversations_come_first_and_each_of_a_generator_says_who_made_it() -> None:
    prompt = {"id": "p", "completions": [ONE]}
    generated = [
        {"id": "p", "completions": [TWO], "persona": "a nurse"},
        {"id": "p", "completions": [THREE, ONE]},
    ]
    assert list(offline_completions(prompt)) == [(ONE, {})]
    assert list(offline_completions(prompt, generated, ["hf:a", "sft@step=4"])) == [
        (ONE, {}),
        (TWO, {"model": "hf:a", "persona": "a nurse"}),
        (THREE, {"model": "sft@step=4"}),
        (ONE, {"model": "sft@step=4"}),
    ]
