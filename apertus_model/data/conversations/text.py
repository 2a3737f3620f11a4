"""The texts of a conversation, as filters and classifiers read them, and without personal data.

Invariant: the text of a conversation, or of its answer, depends on its messages in normal form alone; it
contains no control token and no definition of a tool.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from apertus_model.chat.messages import Block, Message, answered, blocks_of, normal_tools, normalise
from apertus_model.data.conversations.stored import Conversation
from apertus_model.data.corpora.pii import Replacer

SEPARATOR = "\n\n"


def messages_of(conversation: Conversation) -> list[Message]:
    """The messages in normal form, the last one the assistant's. ConversationError as `answered`."""
    return answered(conversation.messages, normal_tools(conversation.tools))


def conversation_text(messages: Sequence[Message]) -> str:
    """The texts of all messages, in order, with blank lines between them. A tool call is a line of JSON."""
    return SEPARATOR.join(text for message in messages for text in _texts(message))


def answer_text(messages: Sequence[Message]) -> str:
    """The responses of the last message, the assistant's, or all of its texts when it only calls tools."""
    responses = [block["text"] for block in blocks_of(messages[-1]) if block["type"] == "response"]
    return SEPARATOR.join(responses or _texts(messages[-1]))


TEXTS: dict[str, Callable[[Sequence[Message]], str]] = {
    "conversation": conversation_text,
    "answer": answer_text,
}
"""The texts that a filter can read, by its `of`."""


def _texts(message: Message) -> list[str]:
    if message["role"] == "assistant":
        return [text for block in blocks_of(message) for text in _texts_of_block(block)]
    return [message["content"]] if message["content"] else []


def _texts_of_block(block: Block) -> list[str]:
    if block["type"] == "tool_calls":
        return [json.dumps(call, ensure_ascii=False) for call in block["calls"]]
    return list(block["outputs"]) if block["type"] == "tool_outputs" else [block["text"]]


def without_personal_data(
    conversation: Conversation, replacer: Replacer
) -> tuple[Conversation, tuple[int, ...]]:
    """The conversation with placeholders, and the number of placeholders of each kind in its messages.

    Values of arguments are replaced like the user's text, so that a call still repeats what the user said.
    Roles, names of tools, keys of arguments, and definitions of tools stay."""
    counts = [0] * len(replacer.kinds)
    if not counts:
        return conversation, ()

    def counted(text: str) -> str:
        text, replaced = replacer(text)
        counts[:] = [total + number for total, number in zip(counts, replaced, strict=True)]
        return text

    messages = [_replaced(message, counted) for message in normalise(conversation.messages)]
    completions = [replacer(text)[0] for text in conversation.completions]
    return replace(conversation, messages=messages, completions=completions), tuple(counts)


def _replaced(message: Message, put: Callable[[str], str]) -> Message:
    content = message["content"]
    if isinstance(content, str):
        return message | {"content": put(content)}
    return message | {"content": [_replaced_block(block, put) for block in content]}


def _replaced_block(block: Block, put: Callable[[str], str]) -> Block:
    if block["type"] == "tool_calls":
        calls = [call | {"arguments": _values(call["arguments"], put)} for call in block["calls"]]
        return block | {"calls": calls}
    if block["type"] == "tool_outputs":
        return block | {"outputs": [put(output) for output in block["outputs"]]}
    return block | {"text": put(block["text"])}


def _values(value: Any, put: Callable[[str], str]) -> Any:
    """The value with `put` applied to all texts in it, at any depth, but not to keys."""
    if isinstance(value, str):
        return put(value)
    if isinstance(value, dict):
        return {key: _values(item, put) for key, item in value.items()}
    return [_values(item, put) for item in value] if isinstance(value, list) else value
