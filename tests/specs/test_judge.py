"""What a judge is asked, and what makes it another judge."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from specs.judge import Judge, clauses
from specs.rewards import RewardSpec

STATED: dict[str, Any] = {"from": "sft", "constitution": "folder/constitution.txt"}
SERVED: dict[str, Any] = {
    "server": {"url": "http://host/v1", "model": "theirs", "api": "chat"},
    "revision": "2026-01",
    "constitution": "c.txt",
}


def test_clauses_are_found_by_their_numbers() -> None:
    text = """# 1. A heading is no clause

In 2025 this was written.
[1.1] Be kind,
and patient.

This is no part of it.
- 2. Be brief.
3) Be honest.
  4.2 Cite.
"""
    assert clauses(text) == {
        "1.1": "Be kind, and patient.",
        "2": "Be brief.",
        "3": "Be honest.",
        "4.2": "Cite.",
    }


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no line begins with the number of a clause"),
        ("Be kind.\n\n## 1. Kindness\n", "no line begins with the number of a clause"),
        ("1. Be kind.\n2. Be brief.\n1. Be honest.", "clause 1 is on line 1 and again on line 3"),
    ],
)
def test_a_text_without_clauses_is_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        clauses(text)


@pytest.mark.parametrize(
    ("stated", "message"),
    [
        ({"constitution": "c"}, "set one of from, server"),
        ({**STATED, **SERVED}, "set one of from, server"),
        ({**SERVED, "server": {"url": "http://host/v1", "model": "theirs"}}, "set server.api: chat"),
        ({**SERVED, "revision": None}, "revision says which model a server has"),
        ({**STATED, "revision": "1"}, "revision says which model a server has"),
        ({**SERVED, "engine": "vllm"}, "engine applies to the model of `from`"),
        ({**STATED, "scale": [1, 10]}, "is not a scale of digits"),
        ({**STATED, "scale": [5, 5]}, "is not a scale of digits"),
        ({**STATED, "template": "{constitution} {prompt}"}, "does not have the field {completion}"),
        ({**STATED, "template": "{prompt} {completion}"}, "does not have the field {constitution}"),
        ({**STATED, "template": "{constitution} {prompt} {answer}"}, "there is no field {answer}"),
        ({**STATED, "pairwise": {"best": 1}}, "greater than or equal to 2"),
        ({**STATED, "pairwise": {"template": "{constitution} {prompt} {first}"}}, "the field {second}"),
        ({**STATED, "constitution": "https://user:secret@host/c.txt"}, "credentials"),
    ],
)
def test_a_wrong_judge_is_refused_with_the_fix(stated: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        Judge.model_validate(stated)


def identity(**more: Any) -> Any:
    return RewardSpec.model_validate({"judge": STATED | more}).identity_fields()


@pytest.mark.parametrize(
    "change",
    [
        {"template": "{constitution} {prompt} {completion}"},
        {"scale": [1, 5]},
        {"chat_template_kwargs": {"enable_thinking": False}},
        {"pairwise": {}},
        {"pairwise": {"best": 3}},
        {"engine": "vllm"},
    ],
)
def test_what_is_asked_is_identity(change: dict[str, Any]) -> None:
    assert identity(**change) != identity()


def test_the_place_of_the_constitution_is_not_identity() -> None:
    """The plan adds its content as an input."""
    assert identity(constitution="elsewhere.txt") == identity()


def test_a_server_is_known_by_its_model_and_the_stated_revision() -> None:
    def served(**more: Any) -> Any:
        return RewardSpec.model_validate({"judge": SERVED | more}).identity_fields()

    moved = {**SERVED["server"], "url": "http://other/v1", "requests": 4}
    assert served(server=moved) == served()
    assert served(revision="2026-02") != served()
    assert served(server={**SERVED["server"], "model": "other"}) != served()
