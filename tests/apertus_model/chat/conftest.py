from __future__ import annotations

from typing import Any

import pytest
from tokenizers import Tokenizer

from apertus_model.data.tokens.vocabulary import train

TEXT = (
    "the answer of a tool and of an assistant Deliberation: enabled disabled Tool Capabilities: type any"
    " string number ]Then Weather 15 "
)


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return train([TEXT * 3], 512, 100)


@pytest.fixture(scope="session")
def byte_tokenizer() -> Tokenizer:
    """One token per byte, and the special tokens."""
    return train([""], 356, 100)


@pytest.fixture
def weather() -> dict[str, Any]:
    return {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Weather of a city.\nIn degrees.",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string", "description": "its name"},
                    "unit": {"enum": ["celsius", "kelvin"]},
                    "days": {"type": "array", "items": {"type": ["integer", "null"]}},
                    "place": {
                        "type": "object",
                        "properties": {"items": {"anyOf": [{"type": "number"}, {"type": "boolean"}]}},
                    },
                },
                "required": ["city"],
            },
        },
    }


@pytest.fixture
def all_blocks() -> list[dict[str, Any]]:
    """A conversation with every kind of message and block."""
    return [
        {"role": "system", "content": "Be brief."},
        {"role": "developer", "content": "Today is Monday.", "enable_thinking": True},
        {"role": "user", "content": "How warm is it?"},
        {
            "role": "assistant",
            "content": [
                {"type": "thoughts", "text": "I have to ask."},
                {
                    "type": "tool_calls",
                    "calls": [{"name": "weather", "arguments": {"city": "Zürich", "days": [1]}}],
                },
                {"type": "tool_outputs", "outputs": ["15", '{"sun": true}']},
                {"type": "response", "text": "15 degrees."},
            ],
        },
        {"role": "user", "content": "Thanks"},
        {"role": "assistant", "content": "Welcome."},
    ]
