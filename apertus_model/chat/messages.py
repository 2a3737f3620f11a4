"""Converts messages of any usual form to the normal form.

Invariant: `normalise` returns `[system] [developer] (user assistant)* [user]`, where a message is one of

    {"role": "system" | "user", "content": text}
    {"role": "developer", "content": text, "enable_thinking": bool (optional), "tools": list (optional)}
    {"role": "assistant", "content": text, or a list of blocks}

and blocks are `{"type": "thoughts" | "response", "text": text}`, `{"type": "tool_calls", "calls": [{"name":
text, "arguments": mapping}]}` and `{"type": "tool_outputs", "outputs": [text, ...]}`. A block has `"train":
False` if it is not trained; outputs never are. An assistant's content is text exactly when it is a single
response that is trained; outputs directly follow calls. Both forms render to the same text. Normalising twice
changes nothing.

Nothing is dropped in silence: every key of a message, block or call is read (`KEYS`), is one of `NOTES`, or
the messages are refused. Null, "", [] and {} stand for a key that is not there.
"""

import itertools
import json
from collections.abc import Mapping, Sequence
from typing import Any

Message = dict[str, Any]
Block = dict[str, Any]

TRAINS = ("train", "trainable", "training", "loss", "weight")
"""Keys that say whether a message is trained, as truth value or as 0 and 1."""
THOUGHTS = ("reasoning_content", "reasoning", "thinking")
NOTES = ("id", "index", "timestamp", "model", "source")
"""Keys about a message that are not read."""
KEYS: dict[str, tuple[str, ...]] = {
    "developer": ("enable_thinking", "tools"),
    "assistant": (*THOUGHTS, "tool_calls", "function_call"),
    "tool": ("tool_call_id", "name"),
}
"""Keys that are read in messages of a role, besides `role`, `content` and `TRAINS`."""
CALL = ("id", "type", "index")
"""Keys of a tool call besides its name and arguments, which may be in its `function`."""
FOLLOWS = {"user": ("", "assistant", "tool"), "assistant": ("user", "tool"), "tool": ("assistant",)}


class ConversationError(ValueError):
    """Messages that are not a conversation. `reason` is the name under which they are counted."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


def normalise(messages: Sequence[Mapping[str, Any]]) -> list[Message]:
    """The messages in normal form. Accepted as well: contents as lists of `{"type": "text", "text"}`; an
    assistant's `tool_calls` or `function_call` (`{"id", "function": {"name", "arguments"}}` or the inner
    mapping, arguments as mapping or JSON) and `THOUGHTS`; messages of role `tool` or `function` after them,
    which become tool outputs of the turn; `TRAINS`. ConversationError for anything else."""
    if (
        not isinstance(messages, Sequence)
        or isinstance(messages, str)
        or not all(isinstance(message, Mapping) for message in messages)
    ):
        raise ConversationError(
            "not_messages", f"messages are a list of mappings with role and content, not {_shown(messages)}"
        )
    head, turns = _head([_read(message) for message in messages])
    normal: list[Message] = []
    blocks: list[Block] = []
    before = ""
    for role, group in itertools.groupby(turns, lambda message: str(message["role"])):
        first, *more = group
        if before not in FOLLOWS.get(role, ()) or (more and role != "tool"):
            problem = f"a message of role {role} follows {role if more else before or 'the start'}"
            raise ConversationError("not_alternating", problem)
        if role == "user":
            if blocks:
                if any(call["id"] is not None for call in blocks[-1].get("calls", [])):
                    raise ConversationError("bad_tool_result", "tool calls with ids have no results")
                normal.append(_assistant(blocks))
                blocks = []
            if not (text := _text(first.get("content"))).strip():
                raise ConversationError("empty", "a message of role user has no text")
            normal.append({"role": "user", "content": text})
        elif role == "assistant":
            blocks += _blocks(first)
        else:
            blocks.append({"type": "tool_outputs", "outputs": _outputs(blocks[-1], [first, *more])})
        before = role
        if not blocks and role == "assistant":
            raise ConversationError("empty", "the assistant says nothing")
    if blocks:
        normal.append(_assistant(blocks))
    return head + normal


def answered(messages: Any, tools: list[dict[str, Any]] | None = None) -> list[Message]:
    """The messages in normal form, of which the last one is the assistant's. ConversationError for other
    messages, if nothing in them is trained, and if a developer message has other tools than `tools`."""
    normal = normalise(messages)
    if not normal or normal[-1]["role"] != "assistant":
        raise ConversationError("no_answer", "the last message is not the assistant's")
    written = [block for message in normal for block in blocks_of(message) if block["type"] != "tool_outputs"]
    if not any(block.get("train", True) for block in written):
        raise ConversationError("nothing_trained", "no message of the assistant is trained")
    one_value("tools", [tools, *(message["tools"] for message in normal if "tools" in message)])
    return normal


def with_deliberation(messages: Sequence[Message], thinking: bool | None = None) -> list[Message]:
    """The messages, in normal form, with a developer message that enables deliberation as `thinking` states
    or, if it is None, when thoughts occur, so that the model learns to think when it is asked to."""
    thinks = any(block["type"] == "thoughts" for message in messages for block in blocks_of(message))
    if thinking is None and not thinks:
        return list(messages)
    place = 1 if messages[0]["role"] == "system" else 0
    own = messages[place] if messages[place]["role"] == "developer" else {}
    thinking = one_value("enable_thinking", [thinking, own.get("enable_thinking")])
    developer = {"role": "developer", "content": ""} | own | {"enable_thinking": thinking is not False}
    return [*messages[:place], developer, *messages[place + bool(own) :]]


def blocks_of(message: Message) -> list[Block]:
    """The blocks of an assistant's message in normal form; none for other messages."""
    if message["role"] != "assistant":
        return []
    content = message["content"]
    return [{"type": "response", "text": content}] if isinstance(content, str) else content


def response_of(message: Message) -> str | None:
    """The text of an assistant's message in normal form that is plain text, else None."""
    plain = message["role"] == "assistant" and isinstance(message["content"], str)
    return message["content"] if plain else None


def _head(messages: list[Mapping[str, Any]]) -> tuple[list[Message], list[Mapping[str, Any]]]:
    """The system (unless it is empty) and the developer message, and the messages after them."""
    head: list[Message] = []
    if messages and messages[0]["role"] == "system":
        text = _text(messages[0].get("content"))
        head += [{"role": "system", "content": text}] if text else []
        messages = messages[1:]
    if messages and messages[0]["role"] == "developer":
        developer: Message = {"role": "developer", "content": _text(messages[0].get("content"))}
        if (thinking := messages[0].get("enable_thinking")) is not None:
            developer["enable_thinking"] = truth("enable_thinking", thinking)
        if (tools := normal_tools(messages[0].get("tools"))) is not None:
            developer["tools"] = tools
        head += [developer] if len(developer) > 2 or developer["content"] else []
        messages = messages[1:]
    return head, messages


def normal_tools(tools: Any) -> list[dict[str, Any]] | None:
    """Tools as a list of mappings with a function's `name`, without null fields, or None when there are none.
    ConversationError for anything else."""
    if isinstance(tools, str):
        tools = _json(tools, "bad_tools") if tools.strip() else None
    if not given(tools):
        return None
    if not isinstance(tools, Sequence) or not all(isinstance(tool, Mapping) for tool in tools):
        raise ConversationError("bad_tools", f"tools are a list of mappings, not {_shown(tools)}")
    normal: list[dict[str, Any]] = without_null(list(tools))
    for tool in normal:
        function = tool.get("function") or tool
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise ConversationError("bad_tools", f"a tool has a name, not {_shown(tool)}")
        if not isinstance(function.get("description") or "", str) or not isinstance(
            function.get("parameters") or {}, Mapping
        ):
            raise ConversationError(
                "bad_tools", f"a tool has a description and a schema of its parameters, not {_shown(tool)}"
            )
    return normal


def given(value: Any) -> bool:
    """Whether a key with this value counts: null and what is empty do not."""
    return value is not None and value != "" and value != [] and value != {}


def without_null(value: Any) -> Any:
    """The value without null fields, at any depth: structs of a column have the union of all fields."""
    if isinstance(value, Mapping):
        return {key: without_null(item) for key, item in value.items() if item is not None}
    return [without_null(item) for item in value] if isinstance(value, list) else value


def one_value(name: str, values: Sequence[Any]) -> Any:
    """The one value that is given, or None. ConversationError when several are that differ."""
    filled = [value for value in values if given(value)]
    if any(value != filled[0] for value in filled):
        raise ConversationError("contradiction", f"there are several {name}, which differ: {_shown(filled)}")
    return filled[0] if filled else None


def truth(name: str, value: Any) -> bool:
    """A truth value, which may be 0 or 1. ConversationError for anything else."""
    if isinstance(value, (bool, int, float)) and value in (0, 1):
        return bool(value)
    raise ConversationError(f"bad_{name}", f"{name} is true or false, not {_shown(value)}")


def _read(message: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of a message that count. ConversationError for one that is not read."""
    role = "tool" if message.get("role") == "function" else str(message.get("role"))
    known = ("role", "content", *TRAINS, *KEYS.get(role, ()), *NOTES)
    filled = known_keys(message, known, f"a message of role {role}") | {"role": role}
    if message.get("role") is None:
        raise ConversationError("not_alternating", "a message has no role")
    if role != "assistant" and _is_trained(filled) is True:
        raise ConversationError("trained_prompt", f"a message of role {role} cannot be trained")
    return filled


def known_keys(value: Mapping[str, Any], keys: Sequence[str], what: str) -> dict[str, Any]:
    """The keys that count. ConversationError for one that is not among `keys`."""
    filled = {key: item for key, item in value.items() if given(item)}
    if unknown := [key for key in filled if key not in keys]:
        raise ConversationError("unknown_key", f"{what} has '{unknown[0]}', which is not read")
    return filled


def _is_trained(value: Mapping[str, Any]) -> bool | None:
    """Whether a message or block is trained; None if it does not say so."""
    weights = [truth("weight", value[key]) for key in TRAINS if key in value]
    return one_value("weights", weights)


def _blocks(message: Mapping[str, Any]) -> list[Block]:
    """The blocks of one assistant message of any form."""
    blocks: list[Block] = []
    if thoughts := one_value("thoughts", [_text(message.get(key)) for key in THOUGHTS]):
        blocks.append({"type": "thoughts", "text": thoughts})
    content = message.get("content")
    if isinstance(content, Sequence) and not isinstance(content, str):
        blocks += [_block(block) for block in content]
    else:
        blocks.append({"type": "response", "text": _text(content)})
    called = message.get("function_call")
    calls = one_value("tool calls", [message.get("tool_calls"), [called] if given(called) else None])
    if calls is not None:
        blocks.append({"type": "tool_calls", "calls": _calls(calls)})
    if _is_trained(message) is False:
        blocks = [block if block["type"] == "tool_outputs" else block | {"train": False} for block in blocks]
    return [block for block in blocks if block.get("text") != ""]


def _block(block: Any) -> Block:
    kind = block.get("type") if isinstance(block, Mapping) else None
    if kind in ("thoughts", "response", "text", "tool_calls"):
        key = "calls" if kind == "tool_calls" else "text"
        filled = known_keys(block, ("type", key, "train"), f"a block {kind}")
        value = _calls(filled.get(key)) if key == "calls" else _text(filled.get(key))
        untrained = {"train": False} if _is_trained(filled) is False else {}
        return {"type": "response" if kind == "text" else kind, key: value, **untrained}
    outputs = block.get("outputs") if kind == "tool_outputs" else None
    if isinstance(outputs, Sequence) and not isinstance(outputs, str):
        known_keys(block, ("type", "outputs"), f"a block {kind}")
        texts = [text if isinstance(text, str) else json.dumps(text, ensure_ascii=False) for text in outputs]
        return {"type": "tool_outputs", "outputs": texts}
    raise ConversationError(
        "bad_block", f"blocks are thoughts, tool_calls, tool_outputs and response, not {_shown(block)}"
    )


def _calls(calls: Any) -> list[dict[str, Any]]:
    """The calls, with the `id` of each (None without one), which `_assistant` leaves out."""
    if not isinstance(calls, Sequence) or isinstance(calls, str) or not calls:
        raise ConversationError("bad_tool_call", f"tool calls are a list, not {_shown(calls)}")
    normal = []
    for call in calls:
        outer = call if isinstance(call, Mapping) else {}
        function = outer.get("function")
        if isinstance(function, Mapping) and function:
            outer = known_keys(outer, (*CALL, "function"), "a tool call")
            function = known_keys(function, ("name", "arguments"), "a function of a tool call")
        else:
            outer = function = known_keys(outer, (*CALL, "name", "arguments"), "a tool call")
        if not isinstance(function.get("name"), str):
            raise ConversationError(
                "bad_tool_call", f"a tool call has a name and arguments, not {_shown(call)}"
            )
        arguments = function.get("arguments", {})
        if isinstance(arguments, str):
            arguments = _json(arguments, "bad_tool_call") if arguments.strip() else {}
        if not isinstance(arguments, Mapping):
            raise ConversationError(
                "bad_tool_call", f"the arguments of a tool call are a mapping, not {_shown(arguments)}"
            )
        normal.append({"name": function["name"], "arguments": dict(arguments), "id": outer.get("id")})
    return normal


def _outputs(block: Block, results: Sequence[Mapping[str, Any]]) -> list[str]:
    """The texts of the results of tools, in the order of the calls of the block before them: by
    `tool_call_id`, else as they come. One result without an id stands for all calls if these have none."""
    if block["type"] != "tool_calls":
        raise ConversationError("bad_block", "tool outputs are one list, directly after tool calls")
    calls: list[dict[str, Any]] = block["calls"]
    ids = [call["id"] for call in calls]
    if any("tool_call_id" in result for result in results):
        by_id = {str(result.get("tool_call_id")): result for result in results}
        ordered = [by_id[str(call_id)] for call_id in ids if call_id is not None and str(call_id) in by_id]
        if not len(ordered) == len(by_id) == len(results) == len(calls):
            what = f"the results {', '.join(by_id)} are not one for each of the calls {_shown(ids)}"
            raise ConversationError("bad_tool_result", what)
        results = ordered
    elif len(results) != len(calls) and (
        len(results) > 1 or "name" in results[0] or any(call_id is not None for call_id in ids)
    ):
        what = f"there are {len(results)} results of {len(calls)} calls"
        raise ConversationError("bad_tool_result", what)
    for result, call in zip(results, calls, strict=False):
        if result.get("name", call["name"]) != call["name"]:
            what = f"a result of {_shown(result['name'])} follows a call of {call['name']}"
            raise ConversationError("bad_tool_result", what)
    return [_text(result.get("content")) for result in results]


def _assistant(blocks: list[Block]) -> Message:
    """The message of a whole turn, with neighbouring responses joined, and calls without ids."""
    joined: list[Block] = []
    for block in blocks:
        kind, before = block["type"], joined[-1]["type"] if joined else ""
        if kind == before == "response":
            if block.keys() != joined[-1].keys():
                raise ConversationError("bad_block", "of neighbouring responses, only one is trained")
            joined[-1] = joined[-1] | {"text": joined[-1]["text"] + block["text"]}
        elif kind == "tool_outputs" and before != "tool_calls":
            raise ConversationError("bad_block", "tool outputs are one list, directly after tool calls")
        elif kind == "tool_calls":
            calls = [{"name": call["name"], "arguments": call["arguments"]} for call in block["calls"]]
            joined.append(block | {"calls": calls})
        else:
            joined.append(block)
    if len(joined) == 1 and joined[0].keys() == {"type", "text"} and joined[0]["type"] == "response":
        return {"role": "assistant", "content": joined[0]["text"]}
    return {"role": "assistant", "content": joined}


def _text(content: Any) -> str:
    """Text as it is, or the joined texts of `{"type": "text", "text"}` parts; None is the empty text."""
    if content is None or isinstance(content, str):
        return content or ""
    if isinstance(content, Sequence) and all(
        isinstance(part, Mapping) and part.get("type") == "text" for part in content
    ):
        parts = [known_keys(part, ("type", "text"), "a text") for part in content]
        return "".join(_text(part.get("text")) for part in parts)
    raise ConversationError("not_text", f"a content is text, not {_shown(content)}")


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
