"""JSON that other programs wrote, or that was damaged: read within bounds, and checked against a model.

Invariant: any bytes give a document or a `ForeignError` that says what is wrong and where, in time and memory
bounded by the size of the file. The document has no number, text or nesting that other code cannot handle.
"""

import json
import math
import os
import re
import reprlib
import stat
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from specs.errors import FieldPath, dotted, some_of
from specs.redaction import mask_url
from specs.wording import message_of, wording

MAX_BYTES = 64 * 2**20
MAX_VALUES = 5_000_000  # a tokenizer of 500,000 merges has half as many
MAX_DEPTH = 100
MAX_DIGITS = 40  # tokenizer_config.json has model_max_length 1000000000000000019884624838656
SHOWN = 3  # problems of one file that a message names
TOO_DEEP = f"it has more than {MAX_DEPTH} brackets inside each other"
HALF = "has half of a character (a lone surrogate)"

IRREGULAR = {
    stat.S_ISDIR: "a folder",
    stat.S_ISFIFO: "a named pipe",
    stat.S_ISSOCK: "a socket",
    stat.S_ISCHR: "a device",
    stat.S_ISBLK: "a device",
}

INFINITE = (".inf", "+.inf", "-.inf", ".nan")
"""Texts that YAML authors write for numbers; a recipe has no such numbers."""

trail: deque[str] = deque(maxlen=1)
"""The file that was read last, for the message of an unexpected error."""

_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


M = TypeVar("M", bound=BaseModel)


class ForeignError(ValueError):
    """A file that cannot be read. The message says why; the caller adds the name of the file."""


class Foreign(BaseModel):
    """The base of the models of such files. A value of the wrong type is an error and is never converted.
    Unknown fields are ignored."""

    model_config = ConfigDict(extra="ignore", frozen=True, strict=True, allow_inf_nan=False, defer_build=True)


class _Spelled(reprlib.Repr):
    """Values as YAML spells them."""

    def repr_NoneType(self, value: None, level: int) -> str:
        return "null"

    def repr_bool(self, value: bool, level: int) -> str:
        return "true" if value else "false"

    def repr_float(self, value: float, level: int) -> str:
        return (
            repr(value) if math.isfinite(value) else repr(value).replace("inf", ".inf").replace("nan", ".nan")
        )

    def repr_str(self, value: str, level: int) -> str:
        return value if value.lower() in INFINITE else super().repr_str(value, level)


_text = _Spelled()
_text.maxstring = _text.maxother = _text.maxlong = 80


def shown(value: Any) -> str:
    """A value for a message, as YAML spells it: at most one line, without the credentials of a URL."""
    return _text.repr(mask_url(value) if isinstance(value, str) else value)


def check_regular(path: str | Path) -> int:
    """The size of a local file. Raises ForeignError for a folder, and for a pipe, a socket or a device, which
    may never end; OSError as usual."""
    state = os.stat(path)
    if not stat.S_ISREG(state.st_mode):
        what = next((name for is_it, name in IRREGULAR.items() if is_it(state.st_mode)), "no file")
        raise ForeignError(f"it is {what}, not a regular file")
    return state.st_size


def check_length(size: int, most: int) -> None:
    """Raises ForeignError for a file of more than `most` bytes."""
    if size > most:
        raise ForeignError(f"it has {size:,} bytes; the limit is {most:,}")


def read_local(path: str | Path, most: int = MAX_BYTES) -> bytes:
    """The content of a local file. Raises ForeignError for a file that is not regular or has more than `most`
    bytes; OSError as usual."""
    check_length(check_regular(path), most)
    return Path(path).read_bytes()


def parse_json(data: bytes, most: int = MAX_BYTES, values: int = MAX_VALUES) -> Any:
    """The document in `data`. Raises ForeignError, which names the field, for anything but JSON (RFC 8259) in
    UTF-8 within the bounds of this module, `most` bytes and `values` values."""
    check_length(len(data), most)
    if data.startswith((b"\xef\xbb\xbf", b"\xff\xfe", b"\xfe\xff")):
        raise ForeignError("it begins with a byte order mark; save it as UTF-8 without one")
    if sum(data.count(sign) for sign in (b",", b"[", b"{")) > values:
        raise ForeignError(f"it has more than {values:,} values")
    refused: list[_Refused] = []

    def integer(text: str) -> Any:
        if len(text) <= MAX_DIGITS:
            return int(text)
        refused.append(_Refused(f"{shown(text)}, a number of {len(text)} digits; the limit is {MAX_DIGITS}"))
        return refused[-1]

    def number(text: str) -> Any:
        if math.isfinite(value := float(text)):
            return value
        refused.append(_Refused(f"{shown(text)}, which is not a finite number"))
        return refused[-1]

    hooks: Any = {"parse_int": integer, "parse_float": number, "parse_constant": number}
    try:
        document = json.loads(data.decode(), **hooks, object_pairs_hook=_without_repetition)
    except UnicodeDecodeError as error:
        raise ForeignError(f"byte {error.start} is not UTF-8; save it as UTF-8") from None
    except json.JSONDecodeError as error:
        raise ForeignError(f"it is not JSON: {error}") from None
    except RecursionError:
        raise ForeignError(TOO_DEEP) from None
    _check_depth(document)
    if refused or _SURROGATE.search(data):
        _check_values(document, ())
    return document


@dataclass(frozen=True)
class _Refused:
    """The replacement of a number that is refused, so that its field can be named."""

    message: str


def _check_values(value: Any, path: FieldPath) -> None:
    if isinstance(value, _Refused):
        raise ForeignError(f"{dotted(path)} is {value.message}")
    if isinstance(value, str) and not is_text(value):
        raise ForeignError(f"{dotted(path)} is {shown(value)}, which {HALF}")
    for key, item in (
        value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    ):
        _check_values(key, path)
        _check_values(item, (*path, key))


def is_text(text: str) -> bool:
    """Whether a text can be written to a file: JSON and YAML can spell half of a surrogate pair, which is not
    a character."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _without_repetition(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        name = Counter(name for name, _ in pairs).most_common(1)[0][0]
        raise ForeignError(f"the key {shown(name)} is repeated; keep one of the two")
    return values


def _check_depth(document: Any) -> None:
    level = [document] if isinstance(document, (dict, list)) else []
    for _ in range(MAX_DEPTH):
        values = (item for outer in level for item in (outer.values() if isinstance(outer, dict) else outer))
        level = [item for item in values if isinstance(item, (dict, list))]
        if not level:
            return
    raise ForeignError(TOO_DEEP)


def checked(model: type[M], document: Any) -> M:
    """The document as a model. Raises ForeignError, which names the wrong fields and their values."""
    if not isinstance(document, dict):
        raise ForeignError(f"it holds {shown(document)}, not an object {{...}}")
    try:
        return model.model_validate(document)
    except ValidationError as error:
        raise ForeignError(explained(error, document)) from None


def explained(error: ValidationError, document: Any, names: Mapping[str, str] | None = None) -> str:
    """Pydantic's problems in one line: field, value and what is wrong with it. `names`: our model's name of a
    field -> its name in the file, where they differ."""
    wrong: dict[str, list[str]] = {}
    for details in error.errors(include_url=False):
        place = dotted(tuple((names or {}).get(str(part), part) for part in _followed(document, details)))
        words = wording(details)
        message = words.phrase if words is not None else message_of(details)
        if details["type"] == "missing":
            wrong.setdefault(f"{place} is missing", [])
        else:
            wrong.setdefault(f"{place} is {shown(details['input'])}: " if place else "", []).append(message)
    return some_of((begin + ", or ".join(messages) for begin, messages in wrong.items()), SHOWN, "; ")


def _followed(document: Any, details: Any) -> FieldPath:
    """Pydantic's location as a path in the document, without the members of unions."""
    path: list[str | int] = []
    for part in details["loc"]:
        if (isinstance(document, dict) and part in document) or (
            isinstance(document, list) and isinstance(part, int) and part < len(document)
        ):
            document = document[part]
        elif details["type"] != "missing" or part != details["loc"][-1]:
            continue
        path.append(part)
    return tuple(path)
