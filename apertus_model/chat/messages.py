"""Converts messages of any usual form to the normal form.

Invariant: `normalise` returns `[system] [developer] (user assistant)* [user]`, where a message is one of

    {"role": "system" | "user", "content": text}
    {"role": "developer", "content": text, "enable_thinking": bool (optional), "tools": list (optional)}
    {"role": "assistant", "content": text, or a list of blocks}

and blocks are `{"type": "thoughts" | "response", "text": text}`, `{"type": "tool_calls", "calls": [{"name":
text, "arguments": mapping}]}` and `{"type": "tool_outputs", "outputs": [text, ...]}`. An assistant's content
is text exactly when it is a single response; outputs directly follow calls. Both forms render to the same
text. Normalising twice changes nothing.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

Message = dict[str, Any]
Block = dict[str, Any]


class ConversationError(ValueError):
    """Messages that are not a conversation. `reason` is the name under which they are counted."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


def normalise(messages: Sequence[Mapping[str, Any]]) -> list[Message]:
    """The messages in normal form.

    Accepted besides the normal form: contents as lists of `{"type": "text", "text"}`; an assistant's
    `tool_calls` (`{"function": {"name", "arguments"}}` or the inner mapping, arguments as a mapping or as
    JSON text) and `reasoning_content`; messages of role `tool` after them, which become tool outputs of the
    assistant's turn.

    Raises:
        ConversationError: for anything else.
    """
    if (
        not isinstance(messages, Sequence)
        or isinstance(messages, str)
        or not all(isinstance(message, Mapping) for message in messages)
    ):
        raise ConversationError(
            "not_messages", f"messages are a list of mappings with role and content, not {_shown(messages)}"
        )
    head, turns = _head(list(messages))
    normal: list[Message] = []
    blocks: list[Block] = []
    before = ""
    for message in turns:
        role = message.get("role")
        if role == "user" and before != "user":
            if blocks:
                normal.append(_assistant(blocks))
                blocks = []
            normal.append({"role": "user", "content": _filled(_text(message.get("content")), "user")})
        elif role == "assistant" and before in ("user", "tool"):
            blocks += _blocks(message)
        elif role == "tool" and before in ("assistant", "tool"):
            if before == "assistant":
                blocks.append({"type": "tool_outputs", "outputs": []})
            blocks[-1]["outputs"].append(_text(message.get("content")))
        else:
            problem = f"a message of role {_shown(role)} follows {before or 'the start'}"
            raise ConversationError("not_alternating", problem)
        before = str(role)
        if role == "assistant" and not blocks:
            raise ConversationError("empty", "the assistant says nothing")
    if blocks:
        normal.append(_assistant(blocks))
    return head + normal


def with_deliberation(messages: Sequence[Message]) -> list[Message]:
    """The messages, in normal form, with a developer message that enables deliberation if thoughts occur and
    it does not state otherwise, so that the model learns to think when it is asked to."""
    if not any(block["type"] == "thoughts" for message in messages for block in blocks_of(message)):
        return list(messages)
    place = 1 if messages[0]["role"] == "system" else 0
    stated = messages[place] if messages[place]["role"] == "developer" else None
    developer = {"role": "developer", "content": "", "enable_thinking": True} | (stated or {})
    return [*messages[:place], developer, *messages[place + (stated is not None) :]]


def blocks_of(message: Message) -> list[Block]:
    """The blocks of an assistant's message in normal form; none for other messages."""
    if message["role"] != "assistant":
        return []
    content = message["content"]
    return [{"type": "response", "text": content}] if isinstance(content, str) else content


def response_of(message: Message) -> str | None:
    """The text of an assistant's message in normal form that is plain text, else None."""
    return (
        message["content"] if message["role"] == "assistant" and isinstance(message["content"], str) else None
    )


def usual_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Messages in normal form, converted to those that chat templates of other models expect: roles `system`,
    `user`, `assistant` with `tool_calls`, and `tool`. The developer's text joins the system message; thoughts
    are left out, as those templates do for past turns."""
    heads = [str(one["content"]) for one in messages if one["role"] in ("system", "developer")]
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
    found: list[dict[str, Any]] = []
    waiting: list[str] = []  # ids of calls without an output
    for message in usual_messages(messages):
        if message["role"] == "tool":
            message = message | {"tool_call_id": waiting.pop(0) if waiting else "call"}
        elif "tool_calls" in message:
            waiting = [f"call_{len(found)}_{number}" for number, _ in enumerate(message["tool_calls"])]
            calls = [
                {"id": name, "type": "function"}
                | {"function": call["function"] | {"arguments": json.dumps(call["function"]["arguments"])}}
                for name, call in zip(waiting, message["tool_calls"], strict=True)
            ]
            message = message | {"tool_calls": calls}
        found.append(message)
    return found


def usual_tools(tools: Sequence[Mapping[str, Any]] | None) -> list[dict[str, Any]] | None:
    """Tools as `{"type": "function", "function": {...}}`, or None when there are none."""
    if not tools:
        return None
    return [dict(one) if "function" in one else {"type": "function", "function": dict(one)} for one in tools]


def _head(messages: list[Mapping[str, Any]]) -> tuple[list[Message], list[Mapping[str, Any]]]:
    """The system and the developer message, and the messages after them. An empty system message is
    ignored."""
    head: list[Message] = []
    if messages and messages[0].get("role") == "system":
        text = _text(messages[0].get("content"))
        head += [{"role": "system", "content": text}] if text else []
        messages = messages[1:]
    if messages and messages[0].get("role") == "developer":
        developer: Message = {"role": "developer", "content": _text(messages[0].get("content"))}
        if (thinking := messages[0].get("enable_thinking")) is not None:
            developer["enable_thinking"] = bool(thinking)
        if tools := messages[0].get("tools"):
            developer["tools"] = normal_tools(tools)
        head += [developer] if len(developer) > 2 or developer["content"] else []
        messages = messages[1:]
    return head, messages


def normal_tools(tools: Any) -> list[dict[str, Any]] | None:
    """Tools as a list of mappings with a function's `name`, or None when there are none. ConversationError
    for anything else."""
    if isinstance(tools, str):
        tools = _json(tools, "bad_tools") if tools.strip() else None
    if not tools:
        return None
    if not isinstance(tools, Sequence) or not all(isinstance(tool, Mapping) for tool in tools):
        raise ConversationError("bad_tools", f"tools are a list of mappings, not {_shown(tools)}")
    for tool in tools:
        function = tool.get("function") or tool
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise ConversationError("bad_tools", f"a tool has a name, not {_shown(tool)}")
        if not isinstance(function.get("description") or "", str) or not isinstance(
            function.get("parameters") or {}, Mapping
        ):
            raise ConversationError(
                "bad_tools", f"a tool has a description and a schema of its parameters, not {_shown(tool)}"
            )
    return [dict(tool) for tool in tools]


def _blocks(message: Mapping[str, Any]) -> list[Block]:
    """The blocks of one assistant message of any form."""
    blocks: list[Block] = []
    if thoughts := message.get("reasoning_content"):
        blocks.append({"type": "thoughts", "text": _text(thoughts)})
    content = message.get("content")
    if isinstance(content, Sequence) and not isinstance(content, str):
        blocks += [_block(block) for block in content]
    else:
        blocks.append({"type": "response", "text": _text(content)})
    if calls := message.get("tool_calls"):
        blocks.append({"type": "tool_calls", "calls": _calls(calls)})
    return [block for block in blocks if block.get("text") != ""]


def _block(block: Any) -> Block:
    kind = block.get("type") if isinstance(block, Mapping) else None
    if kind in ("thoughts", "response", "text"):
        return {"type": "response" if kind == "text" else kind, "text": _text(block.get("text"))}
    if kind == "tool_calls":
        return {"type": "tool_calls", "calls": _calls(block.get("calls"))}
    if (
        kind == "tool_outputs"
        and isinstance(block.get("outputs"), Sequence)
        and not isinstance(block["outputs"], str)
    ):
        outputs = [
            output if isinstance(output, str) else json.dumps(output, ensure_ascii=False)
            for output in block["outputs"]
        ]
        return {"type": "tool_outputs", "outputs": outputs}
    raise ConversationError(
        "bad_block", f"blocks are thoughts, tool_calls, tool_outputs and response, not {_shown(block)}"
    )


def _calls(calls: Any) -> list[dict[str, Any]]:
    if not isinstance(calls, Sequence) or isinstance(calls, str) or not calls:
        raise ConversationError("bad_tool_call", f"tool calls are a list, not {_shown(calls)}")
    normal = []
    for call in calls:
        function = (call.get("function") or call) if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise ConversationError(
                "bad_tool_call", f"a tool call has a name and arguments, not {_shown(call)}"
            )
        arguments = function.get("arguments") or {}
        if isinstance(arguments, str):
            arguments = _json(arguments, "bad_tool_call") if arguments.strip() else {}
        if not isinstance(arguments, Mapping):
            raise ConversationError(
                "bad_tool_call", f"the arguments of a tool call are a mapping, not {_shown(arguments)}"
            )
        normal.append({"name": function["name"], "arguments": dict(arguments)})
    return normal


def _assistant(blocks: list[Block]) -> Message:
    """The message of a whole turn, with neighbouring responses joined."""
    joined: list[Block] = []
    for block in blocks:
        kind, before = block["type"], joined[-1]["type"] if joined else ""
        if kind == before == "response":
            joined[-1] = {"type": kind, "text": joined[-1]["text"] + block["text"]}
        elif kind == "tool_outputs" and before != "tool_calls":
            raise ConversationError("bad_block", "tool outputs are one list, directly after tool calls")
        else:
            joined.append(block)
    if [block["type"] for block in joined] == ["response"]:
        return {"role": "assistant", "content": joined[0]["text"]}
    return {"role": "assistant", "content": joined}


def _text(content: Any) -> str:
    """Text as it is, or the joined texts of `{"type": "text", "text"}` parts; None is the empty text."""
    if content is None or isinstance(content, str):
        return content or ""
    if isinstance(content, Sequence) and all(
        isinstance(part, Mapping) and part.get("type") == "text" for part in content
    ):
        return "".join(_text(part.get("text")) for part in content)
    raise ConversationError("not_text", f"a content is text, not {_shown(content)}")


def _filled(text: str, role: str) -> str:
    if not text.strip():
        raise ConversationError("empty", f"a message of role {role} has no text")
    return text


def _json(text: str, reason: str) -> Any:
    try:
        return json.loads(text, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise ConversationError(reason, f"{_shown(text)} is not JSON: {error}") from error


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
