from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import fsspec
import pyarrow
import pyarrow.parquet
import pytest
import zstandard

from apertus_model.data.conversation_readers import read_conversations
from apertus_model.data.conversations import (
    Conversation,
)
from apertus_model.data.documents import Rejection, open_source
from infra.store.inputs import SourceError
from specs.sources import SourceSpec

HI = {"role": "user", "content": "Hi"}
YES = {"role": "assistant", "content": "Yes"}
NO = {"role": "assistant", "content": "No"}


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
    ],
)
def test_every_form_of_a_row_is_the_same_conversation(
    tmp_path: Path, row: dict[str, Any], completions: list[str]
) -> None:
    found = _row(tmp_path, **row)
    assert isinstance(found, Conversation)
    assert (found.messages, found.completions, found.tools, found.metadata) == (
        [HI, YES],
        completions,
        None,
        {},
    )


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
    assert found[1] == Rejection(reason)
    assert [isinstance(item, Conversation) for item in found] == [True, False, True]


def test_a_file_without_a_known_column_ends_the_stage_with_its_columns(tmp_path: Path) -> None:
    good = json.dumps({"messages": [HI, YES]})
    with pytest.raises(
        SourceError,
        match=r"a\.jsonl', row 2: none of the columns .*messages.*; there are prompt, text\. Fix: rename",
    ):
        _read(tmp_path / "a.jsonl", good + '\n{"text": "x", "prompt": "y"}')


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
