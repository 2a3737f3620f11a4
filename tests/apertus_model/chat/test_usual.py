from __future__ import annotations

from typing import Any

from apertus_model.chat.messages import normalise
from apertus_model.chat.usual import protocol_messages, usual_messages, usual_tools

USER = {"role": "user", "content": "Hi"}
CALL = {"name": "now", "arguments": {"zone": "CET"}}


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
