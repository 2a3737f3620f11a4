"""Converts messages in normal form to those that other programs expect: chat templates of other models, and
servers."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from apertus_model.chat.messages import Message, blocks_of


def usual_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Messages in normal form, converted to those that chat templates of other models expect: roles `system`,
    `user`, `assistant` with `tool_calls`, and `tool`. The developer's text joins the system message; thoughts
    are left out, as those templates do for past turns."""
    heads = [str(head["content"]) for head in messages if head["role"] in ("system", "developer")]
    system = "\n\n".join(filter(None, heads))
    usual: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
    for message in messages:
        if message["role"] == "user":
            usual.append({"role": "user", "content": message["content"]})
        text = ""
        for block in blocks_of(message):
            if block["type"] == "response":
                text += block["text"]
            elif block["type"] == "tool_calls":
                calls = [{"type": "function", "function": call} for call in block["calls"]]
                usual.append({"role": "assistant", "content": text, "tool_calls": calls})
                text = ""
            elif block["type"] == "tool_outputs":
                usual += [{"role": "tool", "content": output} for output in block["outputs"]]
        if text:
            usual.append({"role": "assistant", "content": text})
    return usual


def protocol_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """The messages of `usual_messages`, converted to OpenAI's protocol: every call has an id, which its
    output names, and its arguments are JSON text."""
    converted: list[dict[str, Any]] = []
    waiting: list[str] = []  # ids of calls without an output
    for message in usual_messages(messages):
        if message["role"] == "tool":
            message = message | {"tool_call_id": waiting.pop(0) if waiting else "call"}
        elif "tool_calls" in message:
            waiting = [f"call_{len(converted)}_{number}" for number, _ in enumerate(message["tool_calls"])]
            calls = [
                {"id": name, "type": "function"}
                | {"function": call["function"] | {"arguments": json.dumps(call["function"]["arguments"])}}
                for name, call in zip(waiting, message["tool_calls"], strict=True)
            ]
            message = message | {"tool_calls": calls}
        converted.append(message)
    return converted


def usual_tools(tools: Sequence[Mapping[str, Any]] | None) -> list[dict[str, Any]] | None:
    """Tools as `{"type": "function", "function": {...}}`, or None when there are none."""
    if not tools:
        return None
    return [
        dict(tool) if "function" in tool else {"type": "function", "function": dict(tool)} for tool in tools
    ]
