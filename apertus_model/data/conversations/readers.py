"""Readers of the conversations in the files of a source.

Invariants: malformed rows are counted under a name (`Rejection`); a file none of whose first ROWS_WITHOUT
rows has the columns of a form is a SourceError that names file, columns and the fix. Every column that says
what is trained is read, or the row is rejected. Files are streamed: JSON line by line, Parquet in pieces
(`table_pieces`). docs/reference/conversations.md has the forms and columns for users.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from hashlib import blake2b
from pathlib import PurePosixPath
from typing import Any, BinaryIO

from fsspec import AbstractFileSystem

from apertus_model.chat.messages import (
    TRAINS,
    ConversationError,
    Message,
    answered,
    given,
    known_keys,
    normal_tools,
    normalise,
    one_value,
    response_of,
    truth,
    with_deliberation,
    without_null,
)
from apertus_model.data.conversations.stored import Conversation
from apertus_model.data.documents.compressed import decompressed
from apertus_model.data.documents.parsed import UNREADABLE, Rejection
from apertus_model.data.documents.readers import read_installed
from apertus_model.data.documents.table_pieces import parquet_rows
from apertus_model.data.documents.tables import ROWS_WITHOUT, json_rows
from infra.store.inputs import SourceError
from specs.sources import SourceSpec
from specs.stages.conversations import CONTROL_COLUMNS

COLUMNS = (
    ("chosen", "rejected"),
    ("messages", "rejected_response"),
    ("messages",),
    ("conversations",),
    ("prompt", "completions"),
    ("prompt", "completion"),
    ("instruction", "output"),
)
"""Alternative sets of columns. A row must have one of them; the first that it has is read."""
PREFERENCES = COLUMNS[:2]
SYSTEM = ("system", "system_prompt")
NO_COLUMNS = "no_columns"
LABELS = ("label", "kto_tag")
"""Columns that say whether the answer is wanted."""
NOT_TEXT = ("image", "images", "video", "videos", "audio", "audios")
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
    single file. SourceError when the file cannot be read, its format is unknown, or its columns are."""
    full = f"{root}/{path}" if path else root
    try:
        if source.reader is not None:
            with fs.open(full, "rb") as file:
                yield from read_installed(source, decompressed(file, full), path or PurePosixPath(root).name)
        else:
            yield from _from_rows(fs, full, source.max_document_bytes)
    except UNREADABLE as error:
        raise SourceError(f"cannot read '{full}': {type(error).__name__}: {error}") from error


def _from_rows(fs: AbstractFileSystem, full: str, most: int) -> Parsed:
    known = False
    with fs.open(full, "rb") as raw:
        for number, row in enumerate(_rows(raw, full, most), start=1):
            if isinstance(row, Rejection):
                yield row
                continue
            try:
                yield conversation_of(row)
                known = True
            except ConversationError as error:
                known |= error.reason != NO_COLUMNS
                if not known and number == ROWS_WITHOUT:
                    raise SourceError(f"'{full}', row {number}: {error}. Fix: rename the columns") from error
                name = "" if row.get("id") is None else str(row["id"])
                yield Rejection(error.reason, name.encode(errors="backslashreplace").decode(), str(error))
            except UnicodeEncodeError:
                yield Rejection("not_utf8")
            except RecursionError:
                yield Rejection("not_json")


def _rows(raw: BinaryIO, full: str, most: int) -> Iterator[Row | Rejection]:
    suffixes = PurePosixPath(full).suffixes
    if suffixes[-1:] == [".parquet"]:
        rows = parquet_rows(raw, most)
        return (row if isinstance(row, Rejection) else without_null(row) for row in rows)
    if ".jsonl" in suffixes[-2:]:  # NaN and infinities are not JSON
        return (row for _, row in json_rows(decompressed(raw, full), most, parse_constant=lambda name: None))
    raise SourceError(
        f"'{full}' is neither .parquet nor .jsonl (.jsonl.gz, .jsonl.zst)."
        " Fix: correct the include globs of the source"
    )


def conversation_of(row: Row) -> Conversation:
    """The conversation of a row. By default `id` is a digest of the content, and `group` a digest of the
    messages before the first answer. ConversationError when the row is malformed, UnicodeEncodeError when its
    text cannot be stored."""
    columns = _form(row)
    completions: list[str] = []
    match columns:
        case None:
            known = "; ".join(" and ".join(form) for form in reversed(COLUMNS))
            there = ", ".join(sorted(str(column) for column in row if row[column] is not None)) or "none"
            raise ConversationError(NO_COLUMNS, f"none of the columns {known}; there are {there}")
        case (only,):
            messages = _begun(row, _turns(row[only]))
        case ("prompt", "completions"):
            completions = _texts(row["completions"])
            messages = _begun(row, _prompt(row)) + _messages(completions[0], "assistant")
        case ("prompt", "completion"):
            messages = _begun(row, _prompt(row)) + _messages(row["completion"], "assistant")
        case ("instruction", "output"):
            messages = _begun(row, _instruction(row)) + _messages(row["output"], "assistant")
        case _:
            messages, completions = _preference(row, columns)
    _check_wanted(row, columns)
    tools = normal_tools(one_value("tools", [row.get("tools"), row.get("functions")]))
    messages = answered(messages, tools)
    if not completions and (text := response_of(messages[-1])) is not None:
        completions = [text]
    conversation = Conversation(
        id=_name(row, "id"),
        messages=with_deliberation(messages, _thinking(row)),
        tools=tools,
        completions=completions,
        group=_name(row, "group"),
        metadata={name: row[name] for name in row if name not in CONTROL_COLUMNS and _is_json(row[name])},
        preference=columns in PREFERENCES,
    )
    beginning = next(place for place, message in enumerate(messages) if message["role"] == "assistant")
    return replace(
        conversation,
        id=conversation.id or _digest(conversation.content()),
        group=conversation.group or _digest(json.dumps(messages[:beginning], ensure_ascii=False)),
    )


def _form(row: Row) -> tuple[str, ...] | None:
    """The first set of columns that the row has; one whose columns are all filled comes first."""
    filled = [form for form in COLUMNS if all(given(row.get(column)) for column in form)]
    there = [form for form in COLUMNS if all(row.get(column) is not None for column in form)]
    return next(iter(filled + there), None)


def _check_wanted(row: Row, columns: Sequence[str]) -> None:
    """ConversationError for an answer that the row calls unwanted, or that is not one of text alone."""
    for column in LABELS:
        if given(label := row.get(column)) and not isinstance(label, str) and not truth("label", label):
            raise ConversationError("unwanted_answer", f"'{column}' is false")
    if left_out := [column for column in TRAINS if given(row.get(column)) and row[column] == 0]:
        raise ConversationError("nothing_trained", f"'{left_out[0]}' of the row is {row[left_out[0]]!r}")
    if seen := [column for column in NOT_TEXT if given(row.get(column))]:
        raise ConversationError("not_text", f"there are {seen[0]}, and only text is read")
    if "completions" in columns and given(row.get("labels")):
        raise ConversationError("stepwise", "completions with labels are steps of one answer")


def _thinking(row: Row) -> bool | None:
    """Whether the row asks for deliberation; None if it does not say so."""
    arguments = row.get("chat_template_kwargs")
    if not given(arguments):
        return None
    if not isinstance(arguments, Mapping):
        raise ConversationError("unknown_key", "chat_template_kwargs is not a mapping")
    known = known_keys(arguments, ("enable_thinking",), "chat_template_kwargs")
    return truth("enable_thinking", known["enable_thinking"]) if known else None


def _begun(row: Row, messages: list[Any]) -> list[Any]:
    """The messages after the system message and the history that stand in columns of their own."""
    system = one_value("system messages", [_text_in(row, column) for column in SYSTEM])
    first = messages[0] if messages else None
    if system and isinstance(first, Mapping) and first.get("role") == "system":
        one_value("system messages", [system, first.get("content")])
        messages = messages[1:]
    begin: list[Any] = [{"role": "system", "content": system}] if system else []
    history = row["history"] if given(row.get("history")) else []
    turns = history if isinstance(history, list) else [history]
    if not all(isinstance(turn, list) and len(turn) == 2 for turn in turns):
        raise ConversationError("not_messages", "a history is a list of pairs of question and answer")
    for question, answer in history:
        begin += _messages(question, "user") + _messages(answer, "assistant")
    return begin + messages


def _prompt(row: Row) -> list[Any]:
    if row.get("prompt") is not None:
        return _messages(row["prompt"], "user")
    if row.get("conversations") is not None:
        return _turns(row["conversations"])
    return _instruction(row)


def _instruction(row: Row) -> list[Any]:
    """The question of an Alpaca row: the instruction and, on the lines after it, the input."""
    text = "\n".join(filter(None, (_text_in(row, column) for column in ("instruction", "input"))))
    return _messages(text, "user") if text else []


def _text_in(row: Row, column: str) -> str:
    text = row[column] if given(row.get(column)) else ""
    if not isinstance(text, str):
        raise ConversationError("not_text", f"the column {column} holds no text")
    return text


def _preference(row: Row, columns: Sequence[str]) -> tuple[list[Message], list[str]]:
    """The messages with the chosen completion, and the texts of both completions. As in TRL, the prompt is
    the common beginning of chosen and rejected if these are lists of messages and `prompt` is not one."""
    begin: list[Any] = []
    if columns == ("chosen", "rejected"):
        chosen, rejected = row["chosen"], row["rejected"]
    else:
        *begin, chosen = _turns(row["messages"]) or [None]
        rejected = row["rejected_response"]
    if isinstance(chosen, list) and isinstance(rejected, list) and not isinstance(row.get("prompt"), list):
        while len(begin) < min(len(chosen), len(rejected)) - 1 and chosen[len(begin)] == rejected[len(begin)]:
            begin.append(chosen[len(begin)])
        chosen, rejected = chosen[len(begin) :], rejected[len(begin) :]
    if not (begin := begin or _prompt(row)):
        raise ConversationError("no_prompt", "chosen and rejected begin differently, and there is no prompt")
    begin = _begun(row, begin)
    better, worse = (normalise(begin + _messages(answer, "assistant")) for answer in (chosen, rejected))
    texts = [response_of(messages[-1]) if messages else None for messages in (better, worse)]
    if better[:-1] != worse[:-1] or None in texts:
        message = "chosen and rejected are not one turn of plain text each, after the same prompt"
        raise ConversationError("bad_completions", message)
    return better, [text for text in texts if text is not None]


def _messages(value: Any, role: str) -> list[Any]:
    if isinstance(value, str):
        return [{"role": role, "content": value}]
    return _turns(value if isinstance(value, list) else [value])


def _texts(value: Any) -> list[str]:
    if not isinstance(value, list) or not value or not all(isinstance(text, str) and text for text in value):
        raise ConversationError("bad_completions", "completions are a list of texts")
    return value


def _turns(value: Any) -> list[Any]:
    """The messages of a list; `{"from", "value"}` becomes `{"role", "content"}`."""
    if not isinstance(value, list):
        raise ConversationError("not_messages", "messages are a list of mappings")
    return [_turn(turn) if isinstance(turn, Mapping) and "from" in turn else turn for turn in value]


def _turn(turn: Mapping[str, Any]) -> dict[str, Any]:
    """A turn of ShareGPT as a message, with its other keys."""
    others = {key: value for key, value in turn.items() if key not in ("from", "value")}
    role = SHARE_GPT_ROLES.get(str(turn["from"]), str(turn["from"]))
    message: dict[str, Any] = {"role": role, "content": turn.get("value")}
    if role == "function_call":
        call = _parsed(turn.get("value"))
        message = {"role": "assistant", "tool_calls": call if isinstance(call, list) else [call]}
    if twice := [key for key in message if given(others.get(key))]:
        raise ConversationError("contradiction", f"a message has from and value, and {twice[0]}")
    return others | message


def _parsed(text: Any) -> Any:
    try:
        return json.loads(text)
    except (ValueError, TypeError, RecursionError) as error:
        raise ConversationError("bad_tool_call", "a function call is not JSON") from error


def _name(row: Row, column: str) -> str:
    name = row[column] if given(row.get(column)) else ""
    if not isinstance(name, (str, int, float)):
        raise ConversationError(f"bad_{column}", f"the column {column} holds neither text nor a number")
    return str(name)


def _is_json(value: Any) -> bool:
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError, RecursionError):
        return False
    return True


def _digest(text: str) -> str:
    return blake2b(text.encode(), digest_size=8).hexdigest()
