from __future__ import annotations

import gzip
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import fsspec
import pyarrow
import pyarrow.parquet
import pytest
import zstandard

from apertus_model.chat.messages import TRAINS, ConversationError, given
from apertus_model.data.conversations.readers import (
    COLUMNS,
    LABELS,
    NOT_TEXT,
    ROWS_WITHOUT,
    conversation_of,
    read_conversations,
)
from apertus_model.data.conversations.stored import (
    Conversation,
)
from apertus_model.data.documents.readers import Rejection, open_source
from infra.store.inputs import SourceError
from specs.sources import SourceSpec
from specs.stages.conversations import CONTROL_COLUMNS

HI = {"role": "user", "content": "Hi"}
YES = {"role": "assistant", "content": "Yes"}
NO = {"role": "assistant", "content": "No"}
ASKS, SAYS = {"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Yes"}
BRIEF = {"role": "system", "content": "Be brief."}


def _read(path: Path, content: bytes | str) -> list[Conversation | Rejection]:
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    source = SourceSpec(url=str(path.parent), format="chat")
    return list(read_conversations(source, *open_source(source), path.name))


def _row(tmp_path: Path, **row: Any) -> Conversation | Rejection:
    (found,) = _read(tmp_path / "a.jsonl", json.dumps(row))
    return found


@pytest.mark.parametrize(
    ("row", "completions"),
    [
        ({"messages": [HI, YES]}, ["Yes"]),
        ({"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Yes"}]}, ["Yes"]),
        ({"conversations": [HI, YES]}, ["Yes"]),
        ({"prompt": "Hi", "completion": "Yes"}, ["Yes"]),
        ({"prompt": [HI], "completion": [YES]}, ["Yes"]),
        ({"prompt": "Hi", "completions": ["Yes", "No", "Maybe"]}, ["Yes", "No", "Maybe"]),
        ({"prompt": "Hi", "chosen": "Yes", "rejected": "No"}, ["Yes", "No"]),
        ({"prompt": [HI], "chosen": [YES], "rejected": [NO]}, ["Yes", "No"]),
        ({"prompt": "Hi", "chosen": [YES], "rejected": [NO]}, ["Yes", "No"]),
        ({"prompt": "Hi", "chosen": [HI, YES], "rejected": [HI, NO], "messages": [HI, YES]}, ["Yes", "No"]),
        ({"chosen": [HI, YES], "rejected": [HI, NO]}, ["Yes", "No"]),
        ({"instruction": "Hi", "output": "Yes"}, ["Yes"]),
        ({"instruction": "Hi", "input": "", "output": "Yes", "system": "", "history": []}, ["Yes"]),
        ({"instruction": "Hi", "input": "", "chosen": "Yes", "rejected": "No"}, ["Yes", "No"]),
        (
            {"conversations": [ASKS], "chosen": SAYS, "rejected": {"from": "gpt", "value": "No"}},
            ["Yes", "No"],
        ),
        ({"messages": [HI, YES], "rejected_response": "No"}, ["Yes", "No"]),
        ({"prompt": "Hi", "completion": "Yes", "label": True, "kto_tag": 1}, ["Yes"]),
    ],
)
def test_every_form_of_a_row_is_the_same_conversation(
    tmp_path: Path, row: dict[str, Any], completions: list[str]
) -> None:
    found = _row(tmp_path, **row)
    assert isinstance(found, Conversation)
    metadata = {column: row[column] for column in ("label", "kto_tag") if column in row}
    assert (found.messages, found.completions, found.tools, found.metadata) == (
        [HI, YES],
        completions,
        None,
        metadata,
    )
    assert found.preference == (len(completions) == 2)


def test_further_columns_become_metadata(tmp_path: Path) -> None:
    tool = {"name": "now"}
    found = _row(tmp_path, messages=[HI, YES], tools=[tool], id=7, group="g", score=0.5, tags=["a"])
    assert isinstance(found, Conversation)
    assert (found.id, found.group, found.tools, found.metadata) == (
        "7",
        "g",
        [tool],
        {"score": 0.5, "tags": ["a"]},
    )


@pytest.mark.parametrize("column", ["system", "system_prompt"])
@pytest.mark.parametrize(
    "row",
    [
        {"messages": [HI, YES]},
        {"messages": [BRIEF, HI, YES]},
        {"conversations": [ASKS, SAYS]},
        {"conversations": [{"from": "system", "value": "Be brief."}, ASKS, SAYS]},
        {"prompt": "Hi", "completion": "Yes"},
        {"prompt": "Hi", "completions": ["Yes"]},
        {"prompt": "Hi", "chosen": "Yes", "rejected": "No"},
        {"chosen": [HI, YES], "rejected": [HI, NO]},
        {"messages": [HI, YES], "rejected_response": "No"},
        {"instruction": "Hi", "output": "Yes"},
    ],
)
def test_a_system_column_is_the_system_message(tmp_path: Path, row: dict[str, Any], column: str) -> None:
    found = _row(tmp_path, **row, **{column: "Be brief."})
    assert isinstance(found, Conversation)
    assert found.messages == [BRIEF, HI, YES]
    assert found.metadata == {}


def test_the_input_and_the_history_of_alpaca_are_read(tmp_path: Path) -> None:
    found = _row(tmp_path, instruction="Add.", input="1 + 1", output="2", history=[["Hi", "Yes"]])
    assert isinstance(found, Conversation)
    asked = {"role": "user", "content": "Add.\n1 + 1"}
    assert found.messages == [HI, YES, asked, {"role": "assistant", "content": "2"}]


def test_turns_of_share_gpt_keep_their_other_keys(tmp_path: Path) -> None:
    found = _row(
        tmp_path, conversations=[ASKS, SAYS | {"weight": 0}, ASKS | {"weight": 0.0}, SAYS | {"weight": 1}]
    )
    assert isinstance(found, Conversation)
    untrained = [{"type": "response", "text": "Yes", "train": False}]
    assert found.messages == [HI, YES | {"content": untrained}, HI, YES]


@pytest.mark.parametrize("thinking", [True, False])
def test_arguments_of_the_template_state_deliberation(tmp_path: Path, thinking: bool) -> None:
    found = _row(
        tmp_path, messages=[HI, YES], chat_template_kwargs={"enable_thinking": thinking, "tools": []}
    )
    assert isinstance(found, Conversation)
    assert found.messages == [{"role": "developer", "content": "", "enable_thinking": thinking}, HI, YES]


FORMS: list[dict[str, Any]] = [
    {"messages": [HI, YES]},
    {"conversations": [ASKS, SAYS]},
    {"prompt": "Hi", "completion": "Yes"},
    {"prompt": "Hi", "completions": ["Yes", "No"]},
    {"prompt": "Hi", "chosen": "Yes", "rejected": "No"},
    {"messages": [HI, YES], "rejected_response": "No"},
    {"instruction": "Hi", "output": "Yes"},
]
ODD = (
    *(
        "text",
        0,
        1,
        2,
        -0.5,
        True,
        False,
        ["text"],
        [1],
        [{}],
        [[]],
        [["a", "b"]],
        [None],
        {"a": 1},
    ),
    *([HI], [YES], [HI, YES], HI, ASKS, [{"name": "f"}], {"enable_thinking": True}),
)
SAME = ([HI], [YES], HI, YES, [HI, YES], [ASKS, SAYS], "Hi", "Yes", ASKS)
OTHER_FORMS = {column for columns in COLUMNS for column in columns} | {"input"}


@pytest.mark.parametrize("form", FORMS, ids="+".join)
@pytest.mark.parametrize("column", sorted({*CONTROL_COLUMNS, *LABELS, *NOT_TEXT, "labels", "source"}))
def test_a_column_with_any_value_is_read_or_rejected_by_name(form: dict[str, Any], column: str) -> None:
    plain = conversation_of(form)
    for value in (*ODD, None, "", [], {}):
        try:
            found = conversation_of({**form, column: value})
        except ConversationError as error:
            assert error.reason.isidentifier()
            assert given(value) or column in form, f"{column}: {value!r} stands for no column"
            continue
        read = replace(found, metadata={}) != plain
        if column in form:
            assert read or value in SAME, f"{column}: {value!r} is ignored"
        elif not given(value):
            assert column in OTHER_FORMS or replace(found, metadata={}) == plain
        else:
            metadata = found.metadata.get(column) == value
            assert read or metadata or column in OTHER_FORMS, f"{column}: {value!r} is ignored"
            assert not (column in LABELS and value is False)


def test_conversations_with_the_same_prompt_are_one_group(tmp_path: Path) -> None:
    rows = [
        [HI, YES],
        [HI, NO],
        [HI, YES, {"role": "user", "content": "Sure?"}, NO],
        [{"role": "user", "content": "Ho"}, YES],
    ]
    found = _read(tmp_path / "a.jsonl", "\n".join(json.dumps({"messages": row}) for row in rows))
    groups = [item.group for item in found if isinstance(item, Conversation)]
    assert groups[0] == groups[1] == groups[2] != groups[3]
    assert len({item.id for item in found if isinstance(item, Conversation)}) == 4


def test_a_function_call_of_share_gpt_is_a_block(tmp_path: Path) -> None:
    turns = [
        ("human", "Hi"),
        ("function_call", '{"name": "f", "arguments": {"a": 1}}'),
        ("observation", "2"),
        ("gpt", "Two"),
    ]
    found = _row(tmp_path, conversations=[{"from": role, "value": value} for role, value in turns])
    assert isinstance(found, Conversation)
    assert [block["type"] for block in found.messages[1]["content"]] == [
        "tool_calls",
        "tool_outputs",
        "response",
    ]
    assert found.completions == []


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b"{", "not_json"),
        (b"[1]", "not_json"),
        (b'{"messages": "\xff"}', "not_utf8"),
        (
            b'{"messages": [{"role": "user", "content": "\\ud83d"}, {"role": "assistant", "content": "x"}]}',
            "not_utf8",
        ),
        (json.dumps({"messages": [HI]}), "no_answer"),
        (json.dumps({"messages": []}), "no_answer"),
        (json.dumps({"messages": {"a": 1}}), "not_messages"),
        (json.dumps({"conversations": [{"from": ["x"], "value": "y"}]}), "not_alternating"),
        (json.dumps({"conversations": [{"from": "function_call", "value": "y"}]}), "bad_tool_call"),
        (json.dumps({"prompt": "x", "completions": []}), "bad_completions"),
        (json.dumps({"prompt": "x", "completions": ["y", 1]}), "bad_completions"),
        (json.dumps({"prompt": "x", "completions": ["y", ""]}), "bad_completions"),
        (json.dumps({"prompt": "x", "completion": ""}), "empty"),
        (json.dumps({"prompt": "x", "chosen": "", "rejected": "y"}), "empty"),
        (json.dumps({"prompt": "x", "chosen": "y", "rejected": ""}), "empty"),
        (json.dumps({"prompt": "x", "completion": 3}), "not_messages"),
        (json.dumps({"chosen": "x", "rejected": "y"}), "no_prompt"),
        (json.dumps({"prompt": [HI], "chosen": [YES, HI, NO], "rejected": [YES]}), "bad_completions"),
        (json.dumps({"messages": [HI, YES], "tools": [1]}), "bad_tools"),
        (
            json.dumps({"messages": [HI, YES], "tools": [{"name": "f"}], "functions": [{"name": "g"}]}),
            "contradiction",
        ),
        (json.dumps({"prompt": "x", "completion": "y", "label": False}), "unwanted_answer"),
        (json.dumps({"conversations": [ASKS, SAYS], "kto_tag": False}), "unwanted_answer"),
        *(
            (json.dumps({"messages": [ASKS, SAYS], column: value}), "nothing_trained")
            for column in TRAINS
            for value in (0, False)
        ),
        (json.dumps({"prompt": "x", "completion": "y", "label": 3}), "bad_label"),
        (json.dumps({"prompt": "x", "completions": ["y"], "labels": [True]}), "stepwise"),
        (json.dumps({"messages": [BRIEF, HI, YES], "system": "Be long."}), "contradiction"),
        (json.dumps({"messages": [HI, YES], "system": "a", "system_prompt": "b"}), "contradiction"),
        (json.dumps({"messages": [HI, YES], "images": ["a.png"]}), "not_text"),
        (json.dumps({"messages": [HI, YES], "chat_template_kwargs": {"x": 1}}), "unknown_key"),
        (json.dumps({"conversations": [ASKS | {"role": "user"}, SAYS]}), "contradiction"),
        (json.dumps({"conversations": [ASKS, SAYS | {"weight": 0}]}), "nothing_trained"),
        (json.dumps({"messages": [YES], "rejected_response": "x"}), "no_prompt"),
        (json.dumps({"prompt": "x", "completion": {}}), "not_alternating"),
        (b'{"messages": ' + b"[" * 100_000, "not_json"),
    ],
)
def test_malformed_rows_are_counted_and_the_rest_is_read(
    tmp_path: Path, line: bytes | str, reason: str
) -> None:
    good = json.dumps({"messages": [HI, YES]}).encode()
    found = _read(
        tmp_path / "a.jsonl",
        good + b"\n\n" + (line if isinstance(line, bytes) else line.encode()) + b"\n" + good,
    )
    assert isinstance(found[1], Rejection)
    assert (found[1].reason, found[1].id) == (reason, "")
    assert [isinstance(item, Conversation) for item in found] == [True, False, True]


@pytest.mark.parametrize(
    "row",
    [
        {"text": "x", "prompt": "y"},
        {"prompt": "y"},
        {},
        {"messages": None},
        {"prompt": "y", "completion": None},
        {"prompt": "y", "chosen": "a", "rejected": None},
        {"chosen": None, "rejected": None},
    ],
)
def test_a_row_without_the_columns_of_a_form_is_counted(tmp_path: Path, row: dict[str, Any]) -> None:
    good = json.dumps({"messages": [HI, YES]})
    found = _read(tmp_path / "a.jsonl", f"{good}\n{json.dumps(row)}\n{good}")
    there = ", ".join(sorted(column for column, value in row.items() if value is not None)) or "none"
    assert isinstance(found[1], Rejection)
    assert found[1].reason == "no_columns"
    assert found[1].problem.startswith("none of the columns instruction and output; prompt and completion; ")
    assert found[1].problem.endswith(f"; there are {there}")
    assert [isinstance(item, Conversation) for item in found] == [True, False, True]


def test_a_file_none_of_whose_first_rows_has_the_columns_ends_the_stage(tmp_path: Path) -> None:
    good, other = json.dumps({"messages": [HI, YES]}), json.dumps({"text": "x", "prompt": "y"})
    lines = [other] * (ROWS_WITHOUT - 1)
    assert len(_read(tmp_path / "a.jsonl", "\n".join([*lines, good, other]))) == ROWS_WITHOUT + 1
    with pytest.raises(
        SourceError,
        match=r"a\.jsonl', row 1000: none of the columns .*messages.*; there are prompt, text\. Fix: rename",
    ):
        _read(tmp_path / "a.jsonl", "\n".join([*lines, other]))


def test_the_name_of_a_file_decides_how_it_is_read(tmp_path: Path) -> None:
    line = json.dumps({"messages": [HI, YES]}).encode()
    for name, content in (("a.jsonl.gz", gzip.compress(line)), ("a.jsonl.zst", zstandard.compress(line))):
        assert [type(item) for item in _read(tmp_path / name, content)] == [Conversation]
    with pytest.raises(SourceError, match=r"a\.csv' is neither \.parquet nor \.jsonl"):
        _read(tmp_path / "a.csv", line)
    with pytest.raises(SourceError, match=r"cannot read .*a\.parquet"):
        _read(tmp_path / "a.parquet", line)
    with pytest.raises(SourceError, match=r"cannot read .*b\.jsonl\.gz"):
        _read(tmp_path / "b.jsonl.gz", b"no gzip")


def test_parquet_gives_the_same_as_lines_of_json(tmp_path: Path) -> None:
    call = [{"function": {"name": "f", "arguments": {"a": 1}}}]
    other = [{"function": {"name": "g", "arguments": {"b": "x"}}}]
    answer: list[dict[str, Any]] = [{"role": "tool", "content": "2"}, YES]
    rows = [
        {
            "messages": [HI, {"role": "assistant", "content": None, "tool_calls": calls}, *answer],
            "id": f"{place}",
            "score": place / 2,
        }
        for place, calls in enumerate([call, other] * 300)
    ]
    table = pyarrow.Table.from_pylist(rows)
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet", row_group_size=100)
    lines = "\n".join(json.dumps(row) for row in rows)
    assert _read(tmp_path / "a.parquet", (tmp_path / "a.parquet").read_bytes()) == _read(
        tmp_path / "a.jsonl", lines
    )


def test_a_parquet_column_that_is_no_json_is_left_out(tmp_path: Path) -> None:
    table = pyarrow.table({"prompt": ["Hi"], "completion": ["Yes"], "raw": [b"\xff"], "n": [None]})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    (found,) = _read(tmp_path / "a.parquet", (tmp_path / "a.parquet").read_bytes())
    assert isinstance(found, Conversation)
    assert found.metadata == {}


def test_any_fsspec_url_is_read() -> None:
    fsspec.filesystem("memory").pipe_file("/chat/a.jsonl", json.dumps({"messages": [HI, YES]}).encode())
    source = SourceSpec(url="memory://chat/a.jsonl", format="chat")
    assert [type(item) for item in read_conversations(source, *open_source(source), "")] == [Conversation]
