from __future__ import annotations

import copy
from typing import Any

import pytest

from apertus_model.chat.messages import (
    KEYS,
    NOTES,
    THOUGHTS,
    TRAINS,
    ConversationError,
    answered,
    normal_tools,
    normalise,
    with_deliberation,
)
from apertus_model.chat.template import render

USER = {"role": "user", "content": "Hi"}
CALL = {"name": "now", "arguments": {"zone": "CET"}}


@pytest.mark.parametrize("arguments", [{"zone": "CET"}, '{"zone": "CET"}'])
def test_messages_of_openai_become_one_turn_of_blocks(arguments: Any) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "now", "arguments": arguments}}
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": [{"type": "text", "text": "H"}, {"type": "text", "text": "i"}]},
        {"role": "assistant", "content": None, "reasoning_content": "hm", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "noon"},
        {"role": "assistant", "content": "Noon.", "tool_calls": []},
    ]
    blocks = [
        {"type": "thoughts", "text": "hm"},
        {"type": "tool_calls", "calls": [CALL]},
        {"type": "tool_outputs", "outputs": ["noon"]},
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
        ([USER, {"role": "assistant", "tool_calls": [{"name": "f", "parameters": {"a": 1}}]}], "unknown_key"),
        ([USER, {"role": "assistant", "content": "x", "refusal": "no"}], "unknown_key"),
        ([USER | {"name": "Ada"}], "unknown_key"),
        ([USER, {"role": "assistant", "content": "x", "weight": 0.5}], "bad_weight"),
        ([USER, {"role": "assistant", "content": "x", "weight": 0, "train": True}], "contradiction"),
        ([USER, {"role": "assistant", "content": "x", "thinking": "a", "reasoning": "b"}], "contradiction"),
        ([USER | {"train": True}], "trained_prompt"),
        ([{"role": "developer", "content": "x", "enable_thinking": "no"}, USER], "bad_enable_thinking"),
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


def _asks(*ids: str | None) -> dict[str, Any]:
    calls = [{"id": one, "function": {"name": "weather", "arguments": {"city": one}}} for one in ids]
    return {"role": "assistant", "content": "", "tool_calls": calls}


def _result(text: str, **keys: str) -> dict[str, Any]:
    return {"role": "tool", "content": text, **keys}


BERN, OSLO = _result("15", tool_call_id="Bern"), _result("3", tool_call_id="Oslo")


def _outputs_of(*messages: dict[str, Any]) -> list[str]:
    (outputs,) = [
        block["outputs"]
        for block in normalise([USER, *messages])[1]["content"]
        if block["type"] == "tool_outputs"
    ]
    return outputs  # type: ignore[no-any-return]


def test_results_of_tools_are_those_of_their_calls_by_id() -> None:
    asked = _asks("Bern", "Oslo")
    assert _outputs_of(asked, BERN, OSLO) == _outputs_of(asked, OSLO, BERN) == ["15", "3"]
    assert _outputs_of(asked, _result("15"), _result("3")) == ["15", "3"]
    assert _outputs_of(asked, _result("15", name="weather"), _result("3", name="weather")) == ["15", "3"]
    legacy = {
        "role": "assistant",
        "content": "Let me see.",
        "function_call": {"name": "now", "arguments": "{}"},
    }
    found = normalise([USER, legacy, {"role": "function", "name": "now", "content": "noon"}])
    assert found[1]["content"] == [
        {"type": "response", "text": "Let me see."},
        {"type": "tool_calls", "calls": [{"name": "now", "arguments": {}}]},
        {"type": "tool_outputs", "outputs": ["noon"]},
    ]


def test_one_result_without_an_id_stands_for_all_calls_without_ids() -> None:
    assert _outputs_of(_asks(None, None), _result("[15, 3]")) == ["[15, 3]"]


@pytest.mark.parametrize(
    "messages",
    [
        [_asks("Bern", "Oslo"), BERN],
        [_asks("Bern"), BERN, OSLO],
        [_asks("Bern"), BERN, BERN],
        [_asks("Bern", "Bern"), BERN],
        [_asks("Bern", "Oslo"), BERN, _result("3")],
        [_asks("Bern"), OSLO],
        [_asks(None), BERN],
        [_asks("Bern", "Oslo"), _result("15")],
        [_asks(None), _result("15"), _result("3")],
        [_asks("Bern"), _result("15", name="time")],
        [_asks(None, None), _result("15", name="weather")],
        [_asks("Bern"), USER],
    ],
)
def test_results_that_are_not_one_for_each_call_are_refused(messages: list[dict[str, Any]]) -> None:
    with pytest.raises(ConversationError) as caught:
        normalise([USER, *messages])
    assert caught.value.reason == "bad_tool_result"


def test_a_conversation_may_end_with_calls() -> None:
    calls = [{"name": "weather", "arguments": {"city": "Bern"}}]
    assert answered([USER, _asks("Bern")])[1]["content"] == [{"type": "tool_calls", "calls": calls}]


@pytest.mark.parametrize("key", TRAINS)
@pytest.mark.parametrize("no", [0, 0.0, False])
def test_a_message_that_is_not_trained_is_kept_and_marked(key: str, no: Any) -> None:
    first = {"role": "assistant", "content": "a", "tool_calls": [CALL], key: no}
    last = {"role": "assistant", "content": "b", key: 1 if key == "weight" else True}
    normal = normalise([USER, first, _result("noon"), last, USER | {key: no}, last | {key: no}])
    assert normal[1]["content"] == [
        {"type": "response", "text": "a", "train": False},
        {"type": "tool_calls", "calls": [CALL], "train": False},
        {"type": "tool_outputs", "outputs": ["noon"]},
        {"type": "response", "text": "b"},
    ]
    assert normal[3] == {
        "role": "assistant",
        "content": [{"type": "response", "text": "b", "train": False}],
    }
    assert normalise(normal) == normal


def test_a_conversation_of_which_nothing_is_trained_is_refused() -> None:
    with pytest.raises(ConversationError) as caught:
        answered([USER, {"role": "assistant", "content": "a", "weight": 0}])
    assert caught.value.reason == "nothing_trained"


@pytest.mark.parametrize("key", THOUGHTS)
def test_thoughts_are_read_under_each_of_their_names(key: str) -> None:
    found = normalise([USER, {"role": "assistant", "content": "a", key: "hm"}])[1]["content"]
    assert found == [{"type": "thoughts", "text": "hm"}, {"type": "response", "text": "a"}]


def test_tools_of_the_row_and_of_the_developer_are_the_same() -> None:
    messages = [{"role": "developer", "tools": [{"name": "f"}]}, USER, {"role": "assistant", "content": "a"}]
    assert answered(messages, [{"name": "f"}]) == normalise(messages)
    with pytest.raises(ConversationError, match="several tools, which differ"):
        answered(messages, [{"name": "g"}])


def test_null_fields_of_a_schema_are_not_arguments() -> None:
    tool = {"name": "f", "parameters": {"type": "object", "properties": {"a": {"type": "string"}}}}
    padded = {
        "name": "f",
        "parameters": {"type": "object", "properties": {"a": {"type": "string"}, "b": None}},
    }
    assert normal_tools([padded]) == [tool]


ODD: list[Any] = [
    *("text", 0, 1, 2, -1, 0.5, float("nan"), True, False, 10**400),
    *([1], ["text"], [{}], [[]], [None], [{"type": "text", "text": "t", "x": 1}]),
    *({"a": 1}, {"name": "f"}, {"name": 1}, {"name": "f", "arguments": "{"}, {"function": 3}, {"": ""}),
]
EMPTY: list[Any] = [None, "", [], {}]
PUBLIC = (
    *("name", "refusal", "audio", "annotations", "prefix", "mask", "label", "tool_calls", "tool_call_id"),
    *("function_call", "functions", "tools", "system", "images", "train_detail", "loss_scale", "channel"),
)
"""Further keys that public formats have in messages."""
WHOLE: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "developer", "content": "x"},
    USER,
    {"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": {"a": 1}}}]},
    {"role": "tool", "tool_call_id": "1", "content": "2"},
    {"role": "assistant", "content": [{"type": "text", "text": "Two."}]},
]
KEY = sorted(
    {
        "role",
        "content",
        "unheard_of",
        *TRAINS,
        *NOTES,
        *PUBLIC,
        *(key for keys in KEYS.values() for key in keys),
    }
)


def _places() -> list[tuple[Any, ...]]:
    """Paths of the mappings of `WHOLE` that have keys of their own."""
    call = (3, "tool_calls", 0)
    return [*((place,) for place in range(len(WHOLE))), call, (*call, "function"), (5, "content", 0)]


@pytest.mark.parametrize("key", KEY)
@pytest.mark.parametrize("path", _places(), ids=str)
def test_a_key_with_any_value_is_read_or_refused_by_name(path: tuple[Any, ...], key: str) -> None:
    plain = normalise(WHOLE)
    for value in [*ODD, *EMPTY]:
        messages = copy.deepcopy(WHOLE)
        place: Any = messages
        for step in path:
            place = place[step]
        known = key in place
        place[key] = value
        try:
            found = normalise(messages)
        except ConversationError as error:
            assert error.reason.isidentifier()
            assert not any(value is empty for empty in EMPTY) or known, "an empty value stands for no key"
            continue
        if value in EMPTY and not known:
            assert found == plain
        elif found == plain:
            about = key in (*NOTES, "id", "index", "type")
            trained = key in TRAINS and value in ((0, 1) if path[0] in (0, 1, 2, 4) else (1,))
            called = key == "name" and value == "f" or key == "arguments"
            assert about or trained or called or known, f"{key}: {value!r} is ignored"
