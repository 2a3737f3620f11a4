from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from specs.base import fingerprint
from specs.stages.harness import ClassifierSpec, GenerationArguments, Harness, HarnessPart, Suite


def test_what_changes_scores_is_in_the_fingerprint_and_places_are_not() -> None:
    plain: dict[str, Any] = {"tasks": ["x"]}
    fields = HarnessPart(suite=Suite(**plain).resolved(chat=False)).identity_fields()
    assert fields == {"suite": {"tasks": ["x"]}}
    stated: list[dict[str, Any]] = [
        {"few_shot": 5},
        {"chat_template": True},
        {"system_instruction": "Be brief."},
        {"generation": {"max_gen_toks": 4}},
        {"max_length": 512},
        {"sequence_lengths": [4096]},
        {"seed": 7},
        {"limit": 3},
        {"sandbox": "bubblewrap"},
        {"classifier": {"model": "a", "label": "toxic"}},
        {"classifier": {"model": "a", "label": "rude"}},
        {"classifier": {"model": "a", "label": "toxic", "max_tokens": 8}},
    ]
    parts = [HarnessPart(suite=Suite(**plain, **more).resolved(chat=False)) for more in stated]
    parts.append(HarnessPart(suite=Suite(**plain).resolved(chat=False), engine="vllm"))
    prints = {fingerprint("harness", 2, part.identity_fields(), {}) for part in parts}
    assert len(prints) == len(parts) and fingerprint("harness", 2, fields, {}) not in prints
    elsewhere = HarnessPart(suite=Suite(**plain).resolved(chat=False), datasets="s3://a/b", include="c")
    assert elsewhere.identity_fields() == fields
    models = [
        Suite(**plain, classifier=ClassifierSpec(model=url, label="toxic")) for url in ("a", "s3://b/c")
    ]
    assert models[0].identity_fields() == models[1].identity_fields()


@pytest.mark.parametrize(
    ("stated", "message"),
    [
        ({"label": "toxic"}, "model"),
        ({"model": "a", "label": "a/b"}, "should match pattern"),
        ({"model": "a", "label": ""}, "should match pattern"),
        ({"model": "installed:../x", "label": "toxic"}, "installed:"),
    ],
)
def test_a_classifier_that_cannot_be_one_is_refused(stated: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        ClassifierSpec.model_validate(stated)


@pytest.mark.parametrize(
    ("stated", "chat", "template", "turns"),
    [
        ({}, True, True, True),
        ({}, False, False, False),
        ({"chat_template": False}, True, False, False),
        ({"few_shot_as_turns": False}, True, True, False),
        ({"chat_template": True}, False, True, True),
    ],
)
def test_the_chat_template_is_on_for_models_trained_on_conversations(
    stated: dict[str, Any], chat: bool, template: bool, turns: bool
) -> None:
    suite = Suite(tasks=["x"], **stated).resolved(chat)
    assert (suite.chat_template, suite.few_shot_as_turns) == (template, turns)


@pytest.mark.parametrize(
    ("suites", "message"),
    [
        ({}, "at least 1 item"),
        ({"perplexity": {"tasks": ["x"]}}, "'perplexity' has the name of other metrics"),
        ({"a/b": {"tasks": ["x"]}}, "should match pattern"),
        ({"a": {"tasks": ["x", "y", "x"]}}, "tasks names x twice"),
        (
            {"a": {"tasks": ["x"], "chat_template": False, "few_shot_as_turns": True}},
            "needs the chat template",
        ),
        ({"a": {"tasks": ["x"], "generation": {"temperature": 0.7}}}, "temperature need do_sample: true"),
    ],
)
def test_suites_that_cannot_be_meant_are_refused(suites: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        Harness.model_validate({"suites": suites})


def test_greedy_answers_may_be_stated() -> None:
    assert GenerationArguments(do_sample=False, temperature=0.0).stated() == {
        "do_sample": False,
        "temperature": 0.0,
    }
