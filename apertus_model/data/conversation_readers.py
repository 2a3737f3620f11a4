"""Readers of the conversations in the files of a source.

Invariants: malformed rows are counted under a name (`Rejection`); a file whose rows have none of the known
columns is a SourceError that names file, row, columns and the fix. Files are streamed: JSON line by line,
Parquet in batches of rows.
"""

from __future__ import annotations

import json
import lzma
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from hashlib import blake2b
from pathlib import PurePosixPath
from typing import Any, BinaryIO

import pyarrow
import pyarrow.parquet
from fsspec import AbstractFileSystem

from apertus_model.chat.messages import (
    ConversationError,
    Message,
    normal_tools,
    normalise,
    response_of,
    with_deliberation,
)
from apertus_model.data.compressed import decompressed
from apertus_model.data.conversations import Conversation
from apertus_model.data.documents import Rejection
from apertus_model.data.installed import read_installed
from apertus_model.data.tables import json_rows
from infra.store.inputs import SourceError
from specs.sources import SourceSpec

ROWS_PER_BATCH = 256
COLUMNS = (
    ("chosen", "rejected"),
    ("messages",),
    ("conversations",),
    ("prompt", "completions"),
    ("prompt", "completion"),
)
"""Alternative sets of columns. A row must have one of them; the first that it has is read."""
SHARE_GPT_ROLES = {
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "chatgpt", "assistant", "model", "bot"), "assistant"),
    **dict.fromkeys(("tool", "observation", "function_response"), "tool"),
    **{"system": "system", "developer": "developer", "function_call": "function_call"},
}
Parsed = Iterator[Conversation | Rejection]
Row = dict[str, Any]


def read_conversations(source: SourceSpec, fs: AbstractFileSystem, root: str, path: str) -> Parsed:
    """The conversations and rejections of one file; `path` is relative to `root`, "" when the source is a
    single file.

    Raises SourceError when the file cannot be read, its format is unknown, or its columns are.
    """
    full = f"{root}/{path}" if path else root
    try:
        if source.reader is not None:
            with fs.open(full, "rb") as file:
                yield from read_installed(source, decompressed(file, full), path or PurePosixPath(root).name)
        else:
            yield from _from_rows(fs, full)
    except (OSError, EOFError, zlib.error, lzma.LZMAError, pyarrow.ArrowException) as error:
        raise SourceError(f"cannot read '{full}': {type(error).__name__}: {error}") from error


def _from_rows(fs: AbstractFileSystem, full: str) -> Parsed:
    reader = _reader(full)
    with fs.open(full, "rb") as raw:
        for number, row in enumerate(
            reader(raw if reader is _parquet_rows else decompressed(raw, full)), start=1
        ):
            if isinstance(row, Rejection):
                yield row
                continue
            if not any(all(row.get(column) is not None for column in columns) for columns in COLUMNS):
                known = "; ".join(" and ".join(columns) for columns in reversed(COLUMNS))
                found = ", ".join(sorted(map(str, row))) or "none"
                raise SourceError(
                    f"'{full}', row {number}: none of the columns {known}; there are {found}. Fix: rename the"
                    " columns"
                )
            try:
                yield conversation_of(row)
            except ConversationError as error:
                name = _name(row.get("id")).encode(errors="backslashreplace").decode()
                yield Rejection(error.reason, name)
            except UnicodeEncodeError:
                yield Rejection("not_utf8")
            except RecursionError:
                yield Rejection("not_json")


def _reader(full: str) -> Callable[[BinaryIO], Iterator[Row | Rejection]]:
    suffixes = PurePosixPath(full).suffixes
    if suffixes[-1:] == [".parquet"]:
        return _parquet_rows
    if ".jsonl" in suffixes[-2:]:
        return _json_rows
    raise SourceError(
        f"'{full}' is neither .parquet nor .jsonl (.jsonl.gz, .jsonl.zst)."
        " Fix: correct the include globs of the source"
    )


def _json_rows(file: BinaryIO) -> Iterator[Row | Rejection]:
    for _, row in json_rows(file, parse_constant=lambda name: None):  # NaN and infinities are not JSON
        yield row


def _parquet_rows(file: BinaryIO) -> Iterator[Row]:
    for batch in pyarrow.parquet.ParquetFile(file).iter_batches(batch_size=ROWS_PER_BATCH):
        for row in batch.to_pylist():
            yield _without_null(row)


def _without_null(value: Any) -> Any:
    """Removes null fields: all structs of a Parquet column have the union of their fields, null where a row
    has none."""
    if isinstance(value, dict):
        return {key: _without_null(item) for key, item in value.items() if item is not None}
    return [_without_null(item) for item in value] if isinstance(value, list) else value


def conversation_of(row: Row) -> Conversation:
    """The conversation of a row. By default `id` is a digest of the content, and `group` a digest of the
    messages before the first answer.

    ConversationError when the row is malformed, UnicodeEncodeError when its text cannot be stored.
    """
    columns = next(columns for columns in COLUMNS if all(row.get(column) is not None for column in columns))
    completions: list[str] = []
    match columns:
        case ("messages",):
            messages = normalise(row["messages"])
        case ("conversations",):
            messages = normalise(_share_gpt(row["conversations"]))
        case ("prompt", "completion"):
            messages = normalise(_messages(row["prompt"], "user") + _messages(row["completion"], "assistant"))
        case ("prompt", "completions"):
            completions = _texts(row["completions"])
            messages = normalise(_messages(row["prompt"], "user") + _messages(completions[0], "assistant"))
        case _:
            messages, completions = _preference(row)
    if not messages or messages[-1]["role"] != "assistant":
        raise ConversationError("no_answer", "the last message is not the assistant's")
    if not completions and (text := response_of(messages[-1])) is not None:
        completions = [text]
    read = {column for columns in COLUMNS for column in columns} | {"tools", "id", "group"}
    conversation = Conversation(
        id=_name(row.get("id")),
        messages=with_deliberation(messages),
        tools=normal_tools(row.get("tools")),
        completions=completions,
        group=_name(row.get("group")),
        metadata={column: value for column, value in row.items() if column not in read and _is_json(value)},
        preference=columns == ("chosen", "rejected"),
    )
    beginning = next(place for place, message in enumerate(messages) if message["role"] == "assistant")
    return replace(
        conversation,
        id=conversation.id or _digest(conversation.content()),
        group=conversation.group or _digest(json.dumps(messages[:beginning], ensure_ascii=False)),
    )


def _preference(row: Row) -> tuple[list[Message], list[str]]:
    """The messages with the chosen completion, and the texts of both completions. As in TRL, the prompt is
    the common beginning of chosen and rejected if these are lists of messages and `prompt` is not one."""
    chosen, rejected, prompt = row["chosen"], row["rejected"], row.get("prompt")
    begin: list[Any] = []
    if isinstance(chosen, list) and isinstance(rejected, list) and not isinstance(prompt, list):
        while len(begin) < min(len(chosen), len(rejected)) - 1 and chosen[len(begin)] == rejected[len(begin)]:
            begin.append(chosen[len(begin)])
        chosen, rejected = chosen[len(begin) :], rejected[len(begin) :]
    if not begin:
        if prompt is None:
            raise ConversationError(
                "no_prompt", "chosen and rejected begin differently, and there is no prompt"
            )
        begin = _messages(prompt, "user")
    better, worse = (normalise(begin + _messages(answer, "assistant")) for answer in (chosen, rejected))
    texts = [response_of(messages[-1]) if messages else None for messages in (better, worse)]
    if better[:-1] != worse[:-1] or None in texts:
        message = "chosen and rejected are not one turn of plain text each, after the same prompt"
        raise ConversationError("bad_completions", message)
    return better, [text for text in texts if text is not None]


def _messages(value: Any, role: str) -> list[Any]:
    return (
        [{"role": role, "content": value}]
        if isinstance(value, str)
        else list(value)
        if isinstance(value, list)
        else [value]
    )


def _texts(value: Any) -> list[str]:
    if not isinstance(value, list) or not value or not all(isinstance(text, str) and text for text in value):
        raise ConversationError("bad_completions", "completions are a list of texts")
    return value


def _share_gpt(value: Any) -> list[Any]:
    """Converts `{"from", "value"}` to `{"role", "content"}`; turns of the usual form stay as they are."""
    if not isinstance(value, list):
        raise ConversationError("not_messages", "conversations are a list of mappings")
    messages: list[Any] = []
    for turn in value:
        if not isinstance(turn, Mapping) or "from" not in turn:
            messages.append(turn)
            continue
        role, content = SHARE_GPT_ROLES.get(str(turn["from"])), turn.get("value")
        if role == "function_call":
            call = _parsed(content)
            messages.append({"role": "assistant", "tool_calls": call if isinstance(call, list) else [call]})
        else:
            messages.append({"role": role or turn["from"], "content": content})
    return messages


def _parsed(text: Any) -> Any:
    try:
        return json.loads(text)
    except (ValueError, TypeError, RecursionError) as error:
        raise ConversationError("bad_tool_call", "a function call is not JSON") from error


def _name(value: Any) -> str:
    return str(value) if isinstance(value, (str, int)) else ""


def _is_json(value: Any) -> bool:
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError, RecursionError):
        return False
    return True


def _digest(text: str) -> str:
    return blake2b(text.encode(), digest_size=8).hexdigest()
