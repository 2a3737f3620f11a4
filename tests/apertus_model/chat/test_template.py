"""The template against its specification, written out by hand, and against transformers."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jinja2 import Environment, TemplateError
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from apertus_model.chat.encoder import ChatEncoder
from apertus_model.chat.messages import normalise
from apertus_model.chat.template import CONTROL_TOKENS, render, template_source
from apertus_model.data.tokens.vocabulary import special_tokens

HEAD = (
    "<s><|system_start|><|system_end|><|developer_start|>Deliberation: disabled\nTool Capabilities:"
    " disabled<|developer_end|>"
)
PROPERTY = settings(max_examples=120, suppress_health_check=[HealthCheck.function_scoped_fixture])


def test_every_part_of_a_conversation_has_its_place(
    all_blocks: list[dict[str, Any]], weather: dict[str, Any]
) -> None:
    assert (
        render(all_blocks, [weather]) == "<s><|system_start|>Be brief.<|system_end|>"
        "<|developer_start|>Today is Monday.\nDeliberation: enabled\nTool Capabilities:\n"
        "// Weather of a city.\n// In degrees.\n"
        "type weather = (_: {\n"
        "// its name\n"
        "city: string,\n"
        'unit?: "celsius" | "kelvin",\n'
        "days?: Array<number | null>,\n"
        "place?: {\nitems?: number | boolean,\n},\n"
        "}) => any;<|developer_end|>"
        "<|user_start|>How warm is it?<|user_end|>"
        "<|assistant_start|><|inner_prefix|>I have to ask.<|inner_suffix|>"
        '<|tools_prefix|>[{"weather": {"city": "Zürich", "days": [1]}}]<|tools_suffix|>[15, {"sun": true}]15'
        " degrees.<|assistant_end|>"
        "<|user_start|>Thanks<|user_end|><|assistant_start|>Welcome.<|assistant_end|>"
    )


def test_the_white_space_settings_of_a_renderer_do_not_matter(
    all_blocks: list[dict[str, Any]], weather: dict[str, Any]
) -> None:
    environment = Environment(trim_blocks=False, lstrip_blocks=False, keep_trailing_newline=True)
    environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
    plain = environment.from_string(template_source())
    assert plain.render(messages=all_blocks, tools=[weather]).rstrip("\n") == render(all_blocks, [weather])


def test_system_and_developer_blocks_are_always_there() -> None:
    assert render([{"role": "user", "content": "Hi"}]) == HEAD + "<|user_start|>Hi<|user_end|>"


def test_a_prompt_ends_with_the_opening_of_a_turn() -> None:
    user = {"role": "user", "content": "Hi"}
    assert render([user], add_generation_prompt=True).endswith("<|user_end|><|assistant_start|>")


@pytest.mark.parametrize("form", ["blocks", "messages"])
def test_a_turn_continues_after_the_output_of_a_tool(form: str) -> None:
    call = {"name": "now", "arguments": {}}
    blocks = [{"type": "tool_calls", "calls": [call]}, {"type": "tool_outputs", "outputs": ["noon"]}]
    turn: list[dict[str, Any]] = [{"role": "assistant", "content": blocks}]
    if form == "messages":
        turn = [
            {"role": "assistant", "tool_calls": [{"function": call}]},
            {"role": "tool", "content": "noon"},
        ]
    text = render([{"role": "user", "content": "Time?"}, *turn], add_generation_prompt=True)
    assert text.endswith('<|assistant_start|><|tools_prefix|>[{"now": {}}]<|tools_suffix|>[noon]')


def test_deliberation_is_a_variable_unless_the_developer_states_it() -> None:
    user = {"role": "user", "content": "Hi"}
    assert "Deliberation: enabled\n" in render([user], enable_thinking=True)
    off = [{"role": "developer", "content": "", "enable_thinking": False}, user]
    assert "Deliberation: disabled\n" in render(off, enable_thinking=True)


def test_tools_of_the_developer_message_are_offered() -> None:
    tool = {"name": "now", "description": ""}
    text = render([{"role": "developer", "content": "", "tools": [tool]}, {"role": "user", "content": "Hi"}])
    assert "Tool Capabilities:\ntype now = () => any;<|developer_end|>" in text


@pytest.mark.parametrize(
    "roles",
    ["user user", "assistant", "user system", "tool", "user tool", "user assistant assistant", "user robot"],
)
def test_messages_out_of_turn_are_refused(roles: str) -> None:
    with pytest.raises(TemplateError, match="take turns"):
        render([{"role": role, "content": "x"} for role in roles.split()])


def _hugging_face(tokenizer: Tokenizer) -> Any:
    opened = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")
    opened.chat_template = template_source()
    return opened


SPELLINGS = special_tokens(100)
plain_text = st.text(st.characters(codec="utf-8", exclude_categories=["Cs"]), min_size=1, max_size=30)
pieces = st.sampled_from(
    ["{{ x }}", "{% if %}", "<", "|", "\n", "  ", "]", "'\"\\", "ünïcödé", "日本", "\U000f0000", "a word "]
)
texts = st.lists(st.one_of(plain_text, pieces), min_size=1, max_size=4).map("".join)
texts = texts.filter(lambda text: text.strip() and not any(token in text for token in SPELLINGS))
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | texts,
    st.lists,
)
names = st.sampled_from(["search", "items", "get", "run_2"])
arguments = st.dictionaries(names, values, max_size=3)
calls = st.lists(st.fixed_dictionaries({"name": names, "arguments": arguments}), min_size=1, max_size=2)
schemas = st.recursive(
    st.fixed_dictionaries(
        {"type": st.sampled_from(["string", "integer", "null", ["string", "boolean"], "other"])},
        optional={"description": texts},
    )
    | st.fixed_dictionaries({"enum": st.lists(texts | st.integers(), min_size=1, max_size=2)}),
    lambda inner: (
        st.fixed_dictionaries({"type": st.just("array")}, optional={"items": inner})
        | st.fixed_dictionaries({"anyOf": st.lists(inner, min_size=1, max_size=2)})
        | st.fixed_dictionaries(
            {"type": st.just("object")},
            optional={
                "properties": st.dictionaries(names, inner, max_size=2),
                "required": st.lists(names, max_size=2),
            },
        )
    ),
    max_leaves=4,
)
functions = st.fixed_dictionaries({"name": names}, optional={"description": texts, "parameters": schemas})
tools = st.none() | st.lists(
    functions | st.builds(lambda f: {"type": "function", "function": f}, functions), max_size=2
)


@st.composite
def conversations(draw: Any) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    if draw(st.booleans()):
        messages.append({"role": "system", "content": draw(texts)})
    if draw(st.booleans()):
        messages.append(
            {
                "role": "developer",
                "content": draw(st.just("") | texts),
                "enable_thinking": draw(st.booleans()),
            }
        )
    for _ in range(draw(st.integers(1, 3))):
        messages.append({"role": "user", "content": draw(texts)})
        if draw(st.booleans()):
            messages.append({"role": "assistant", "content": draw(texts)})
            continue
        blocks: list[dict[str, Any]] = []
        for kind in draw(
            st.lists(
                st.sampled_from(["thoughts", "call", "call and output", "response"]), min_size=1, max_size=4
            )
        ):
            if kind in ("thoughts", "response"):
                blocks.append({"type": kind, "text": draw(texts)})
            else:
                blocks.append({"type": "tool_calls", "calls": draw(calls)})
                if kind != "call":
                    blocks.append({"type": "tool_outputs", "outputs": draw(st.lists(texts, max_size=2))})
        messages.append({"role": "assistant", "content": blocks})
    return messages


@PROPERTY
@given(messages=conversations(), offered=tools, prompt=st.booleans())
def test_transformers_renders_the_same_text_and_tokens(
    tokenizer: Tokenizer, messages: list[dict[str, Any]], offered: Any, prompt: bool
) -> None:
    theirs = _hugging_face(tokenizer)
    text = theirs.apply_chat_template(messages, tools=offered, tokenize=False, add_generation_prompt=prompt)
    assert render(messages, offered, add_generation_prompt=prompt) == text
    assert render(normalise(messages), offered, add_generation_prompt=prompt) == text
    if not any(token in rest for rest in _between_controls(text) for token in SPELLINGS):
        ids = theirs.apply_chat_template(messages, tools=offered, tokenize=True, return_dict=False)
        assert ChatEncoder(tokenizer).encode(messages, offered).tokens.tolist() == ids


def _between_controls(text: str) -> list[str]:
    """What is left of a rendered text without its control tokens: neighbouring texts can spell one that
    neither does alone."""
    for token in CONTROL_TOKENS:
        text = text.replace(token, "\0")
    return text.split("\0")


@PROPERTY
@given(messages=conversations())
def test_normalising_twice_changes_nothing(messages: list[dict[str, Any]]) -> None:
    assert normalise(normalise(messages)) == normalise(messages)
