"""The chat template, and rendering it as transformers does.

Invariant: only `template.jinja` defines the text of a conversation. It is shipped with every tokenizer
unchanged, so the text of training and the text that other programs render for the model are equal.
"""

import functools
import json
from collections.abc import Mapping, Sequence
from importlib import resources
from typing import Any

from jinja2 import Environment, Template, TemplateError

BEGIN = "<s>"
TURN, END_OF_TURN = "<|assistant_start|>", "<|assistant_end|>"
BLOCK_STARTS = ("<|inner_prefix|>", "<|tools_prefix|>")
TOOLS_END = "<|tools_suffix|>"
CONTROL_TOKENS = (
    *(BEGIN, "<|system_start|>", "<|system_end|>", "<|developer_start|>", "<|developer_end|>"),
    *("<|user_start|>", "<|user_end|>", TURN, END_OF_TURN),
    *(BLOCK_STARTS[0], "<|inner_suffix|>", BLOCK_STARTS[1], TOOLS_END),
)
"""The special tokens that the template writes, in the order of their ids in the Apertus vocabulary: 1, 61 to
72."""


def template_source() -> str:
    """The text of `template.jinja`, for `chat_template.jinja` of a Hugging Face tokenizer."""
    return resources.files("apertus_model.chat").joinpath("template.jinja").read_text(encoding="utf-8")


def render(
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None = None,
    *,
    enable_thinking: bool = False,
    add_generation_prompt: bool = False,
) -> str:
    """The text of a conversation. jinja2.TemplateError for messages that the template refuses."""
    return _template().render(
        messages=messages,
        tools=tools or None,
        enable_thinking=enable_thinking,
        add_generation_prompt=add_generation_prompt,
    )


@functools.cache
def _template() -> Template:
    # as in transformers, but for its sandbox, which our own template does not need and which takes a fifth of
    # the time of encoding; Jinja's own `tojson` escapes for HTML and sorts keys
    environment = Environment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = functools.partial(json.dumps, ensure_ascii=False)
    environment.globals["raise_exception"] = _refuse
    return environment.from_string(template_source())


def _refuse(message: str) -> str:
    raise TemplateError(message)
