from __future__ import annotations

from typing import Any

import pytest

from apertus_model.chat import ConversationError, normalise, render
from apertus_model.chat.messages import (
    normal_tools,
    protocol_messages,
    usual_messages,
    usual_tools,
    with_deliberation,
)

USER = {"role": "user", "content": "Hi"}
CALL = {"name": "now", "arguments": {"zone": "CET"}}


@pytest.mark.parametrize("arguments", [{"zone": "CET"}, '{"zone": "CET"}'])
def test_messages_of_openai_become_one_turn_of_blocks(arguments: Any) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "now", "arguments": arguments}}
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": [{"type": "text", "text": "H"}, {"type": "text", "text": "i"}]},
        {"role": "assistant", "content": None, "reasoning_content": "hm", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "noon"},
        {"role": "tool", "content": "CET"},
        {"role": "assistant", "content": "Noon.", "tool_calls": []},
    ]
    blocks = [
        {"type": "thoughts", "text": "hm"},
        {"type": "tool_calls", "calls": [CALL]},
        {"type": "tool_outputs", "outputs": ["noon", "CET"]},
        {"type": "response", "text": "Noon."},
    ]
    assert normalise(messages) == [USER, {"role": "assistant", "content": blocks}]
    assert render(messages) == render(normalise(messages))


def test_a_turn_that_is_only_a_response_is_text() -> None:
    blocks = [{"type": "response", "text": "a"}, {"type": "text", "text": "b"}]
    assert normalise([USER, {"role": "assistant", "content": blocks}])[1] == {
        "role": "assistant",
        "content": "ab",
    }


def test_an_empty_system_message_is_none() -> None:
    assert normalise([{"role": "system", "content": ""}, {"role": "developer", "content": ""}, USER]) == [
        USER
    ]


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ("text", "not_messages"),
        (["text"], "not_messages"),
        ([USER, USER], "not_alternating"),
        ([{"role": "assistant", "content": "x"}], "not_alternating"),
        ([USER, {"role": "system", "content": "x"}], "not_alternating"),
        ([{"content": "x"}], "not_alternating"),
        ([{"role": "user", "content": " "}], "empty"),
        ([USER, {"role": "assistant", "content": ""}], "empty"),
        ([{"role": "user", "content": 3}], "not_text"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "not_text"),
        ([USER, {"role": "assistant", "content": [{"type": "image"}]}], "bad_block"),
        ([USER, {"role": "assistant", "content": [{"type": "tool_outputs", "outputs": ["x"]}]}], "bad_block"),
        ([USER, {"role": "assistant", "content": "x"}, {"role": "tool", "content": "x"}], "bad_block"),
        (
            [USER, {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}],
            "bad_tool_call",
        ),
        (
            [
                USER,
                {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": '{"a": NaN}'}}]},
            ],
            "bad_tool_call",
        ),
        (
            [USER, {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": [1]}}]}],
            "bad_tool_call",
        ),
        ([USER, {"role": "assistant", "tool_calls": [{"arguments": {}}]}], "bad_tool_call"),
    ],
)
def test_what_is_no_conversation_is_refused_by_name(messages: Any, reason: str) -> None:
    with pytest.raises(ConversationError) as caught:
        normalise(messages)
    assert caught.value.reason == reason


def test_thoughts_enable_deliberation_unless_it_is_stated() -> None:
    system = {"role": "system", "content": "x"}
    turn = {
        "role": "assistant",
        "content": [{"type": "thoughts", "text": "hm"}, {"type": "response", "text": "y"}],
    }
    enabled = {"role": "developer", "content": "", "enable_thinking": True}
    assert with_deliberation([system, USER, turn]) == [system, enabled, USER, turn]
    assert with_deliberation([USER, turn]) == [enabled, USER, turn]
    off = {"role": "developer", "content": "z", "enable_thinking": False}
    assert with_deliberation([system, off, USER, turn]) == [system, off, USER, turn]
    text = {"role": "developer", "content": "z"}
    assert with_deliberation([text, USER, turn]) == [text | {"enable_thinking": True}, USER, turn]
    plain = [USER, {"role": "assistant", "content": "y"}]
    assert with_deliberation(plain) == plain


def test_tools_may_be_json_text_and_need_a_name() -> None:
    assert normal_tools('[{"name": "now"}]') == [{"name": "now"}]
    assert normal_tools([]) is None
    for wrong in ("{", [1], [{"function": {"description": "x"}}], [{"name": "f", "parameters": [1]}]):
        with pytest.raises(ConversationError):
            normal_tools(wrong)


def test_other_templates_get_the_roles_that_they_know_and_no_thoughts() -> None:
    blocks = [
        {"type": "thoughts", "text": "hm"},
        {"type": "response", "text": "Let me see."},
        {"type": "tool_calls", "calls": [CALL, CALL]},
        {"type": "tool_outputs", "outputs": ["noon", "one"]},
        {"type": "response", "text": "Noon."},
    ]
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "developer", "content": "Be kind.", "enable_thinking": True},
        USER,
        {"role": "assistant", "content": blocks},
        USER,
        {"role": "assistant", "content": "Bye"},
    ]
    call = {"type": "function", "function": CALL}
    usual: list[dict[str, Any]] = [
        {"role": "system", "content": "Be brief.\n\nBe kind."},
        USER,
        {"role": "assistant", "content": "Let me see.", "tool_calls": [call, call]},
        {"role": "tool", "content": "noon"},
        {"role": "tool", "content": "one"},
        {"role": "assistant", "content": "Noon."},
        USER,
        {"role": "assistant", "content": "Bye"},
    ]
    assert normalise(messages) == messages
    assert usual_messages(messages) == usual
    sent = protocol_messages(messages)
    text = {"name": "now", "arguments": '{"zone": "CET"}'}
    assert sent[2]["tool_calls"] == [
        {"id": "call_2_0", "type": "function", "function": text},
        {"id": "call_2_1", "type": "function", "function": text},
    ]
    assert [one["tool_call_id"] for one in sent[3:5]] == ["call_2_0", "call_2_1"]
    assert [one for one in sent if one["role"] != "tool" and "tool_calls" not in one] == [
        one for one in usual if one["role"] != "tool" and "tool_calls" not in one
    ]
    assert normalise(sent)[1:] == normalise(usual)[1:]  # which reads both forms


def test_tools_are_functions_or_none() -> None:
    tool = {"name": "now", "parameters": {}}
    assert usual_tools([tool]) == usual_tools([{"type": "function", "function": tool}])
    assert usual_tools(None) is usual_tools([]) is None
