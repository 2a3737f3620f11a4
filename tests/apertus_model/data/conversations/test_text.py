"""The text that filters read of a conversation, and what is replaced in it."""

from __future__ import annotations

from typing import Any

import pytest

from apertus_model.chat.messages import normalise
from apertus_model.data.conversations.stored import Conversation
from apertus_model.data.conversations.text import answer_text, conversation_text, without_personal_data
from apertus_model.data.corpora.pii import Replacer

CALL = {"name": "send", "arguments": {"to": "ada@maths.example", "cc": ["bob@maths.example", 7]}}
MESSAGES: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Write to ada@maths.example."},
    {
        "role": "assistant",
        "content": [
            {"type": "thoughts", "text": "ada@maths.example is known."},
            {"type": "tool_calls", "calls": [CALL]},
            {"type": "tool_outputs", "outputs": ['{"sent": "ada@maths.example"}', "ok"]},
            {"type": "response", "text": "Sent."},
        ],
    },
]


def test_text_of_a_conversation_has_all_its_texts_in_order() -> None:
    assert conversation_text(normalise(MESSAGES)) == (
        "Be brief.\n\nWrite to ada@maths.example.\n\nada@maths.example is known.\n\n"
        '{"name": "send", "arguments": {"to": "ada@maths.example", "cc": ["bob@maths.example", 7]}}\n\n'
        '{"sent": "ada@maths.example"}\n\nok\n\nSent.'
    )


def test_answer_is_the_responses_of_the_last_message_or_its_calls() -> None:
    assert answer_text(normalise(MESSAGES)) == "Sent."
    plain = [{"role": "user", "content": "Hm?"}, {"role": "assistant", "content": "So."}]
    assert answer_text(normalise(plain)) == "So."
    calls = [MESSAGES[1], {"role": "assistant", "content": [{"type": "tool_calls", "calls": [CALL]}]}]
    assert answer_text(normalise(calls)).startswith('{"name": "send"')


def test_personal_data_are_replaced_in_texts_and_values_and_nowhere_else() -> None:
    tools = [{"name": "send", "description": "As root@maths.example."}]
    conversation = Conversation("1", MESSAGES, tools, ["Sent to ada@maths.example."])
    found, counts = without_personal_data(conversation, Replacer(["email", "ip"]))
    call = {"name": "send", "arguments": {"to": "<email-pii>", "cc": ["<email-pii>", 7]}}
    assert found.messages == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Write to <email-pii>."},
        {
            "role": "assistant",
            "content": [
                {"type": "thoughts", "text": "<email-pii> is known."},
                {"type": "tool_calls", "calls": [call]},
                {"type": "tool_outputs", "outputs": ['{"sent": "<email-pii>"}', "ok"]},
                {"type": "response", "text": "Sent."},
            ],
        },
    ]
    assert found.completions == ["Sent to <email-pii>."]
    assert found.tools == tools
    assert counts == (5, 0)
    assert normalise(found.messages) == found.messages


def test_a_message_of_nothing_but_an_address_keeps_a_placeholder() -> None:
    messages = [{"role": "user", "content": "a@b.example"}, {"role": "assistant", "content": "c@d.example"}]
    found, _ = without_personal_data(
        Conversation("1", messages, completions=["c@d.example"]), Replacer(["email"])
    )
    assert [message["content"] for message in found.messages] == ["<email-pii>"] * 2
    assert normalise(found.messages) == found.messages


@pytest.mark.parametrize("kinds", [[], ["phone"]])
def test_a_conversation_without_personal_data_is_unchanged(kinds: Any) -> None:
    conversation = Conversation("1", normalise(MESSAGES))
    assert without_personal_data(conversation, Replacer(kinds))[0] == conversation
