"""Our words for what Pydantic says about a value of a wrong type, or outside its bounds.

Invariant: every such error that the models of this package raise has its words here; errors without words
have a message of our own.
"""

import re
from collections.abc import Iterable
from typing import Any, NamedTuple

from specs.errors import did_you_mean


class Wording(NamedTuple):
    """`phrase` follows `VALUE is`; `fix`: what to write instead."""

    phrase: str
    fix: str


_LIST = Wording("not a list", "write a list, such as [a, b].")
_MAPPING = Wording("not a mapping", "write names and values, such as {name: value}.")
_SIZE = Wording("not a size", "write a size with its unit, such as 5GB.")
_TEXT = Wording("not text", "write text, a number in quotes.")
_SHAPES = {
    "bool": Wording("neither true nor false", "write true or false."),
    "int": Wording("not a whole number", "write a whole number, such as 100."),
    "float": Wording("not a number", "write a number, such as 0.1."),
    "str": _TEXT,
    "string": _TEXT,
    "list": _LIST,
    "tuple": _LIST,
    "dict": _MAPPING,
    "model": _MAPPING,
    "model-fields": _MAPPING,
    "tagged-union": _MAPPING,
}
"""The words for a value of another type, by the type of a schema or the first word of an error's type."""
_BOUNDS = {
    "byte_size": _SIZE,
    "byte_size_unit": _SIZE,
    "finite_number": Wording("not a finite number", "write a number, such as 0.1."),
    "greater_than": Wording("not above {gt}", "write a larger number."),
    "greater_than_equal": Wording("below {ge}", "write {ge} or more."),
    "less_than": Wording("not below {lt}", "write a smaller number."),
    "less_than_equal": Wording("above {le}", "write {le} or less."),
    "multiple_of": Wording("not a multiple of {multiple_of}", "write a multiple."),
    "string_too_short": Wording("too short", "write at least {min_length} characters."),
    "string_too_long": Wording("too long", "write at most {max_length} characters."),
    "string_pattern_mismatch": Wording("not of the form {pattern}", "correct it."),
    "too_short": Wording("too short", "give at least {min_length}, not {actual_length}."),
    "too_long": Wording("too long", "give at most {max_length}, not {actual_length}."),
}
_WRONG_TYPE = re.compile("([a-z]+)_(type|parsing|parsing_size|from_float|attributes_type|error)")


def wrong_type(details: Any) -> str | None:
    """The first word of the type of an error about a value's type, such as `int`; None for another error."""
    kind = _WRONG_TYPE.fullmatch(details["type"])
    return kind[1] if kind and kind[1] != "value" else None


def wording(details: Any, schemas: Iterable[Any] = ()) -> Wording | None:
    """The words for one of Pydantic's errors about a value; None for an error of our own, or about a field
    that is missing or unknown. `schemas`: those of all that may be written there, if known."""
    if (kind := wrong_type(details)) is None:
        bound = _BOUNDS.get(details["type"])
        return bound and Wording(*(text.format(**details.get("ctx", {})) for text in bound))
    words = [_SHAPES[schema["type"]] for schema in schemas if schema["type"] in _SHAPES]
    words = words or ([_SHAPES[kind]] if kind in _SHAPES else [])
    choices = [choice for schema in schemas if schema["type"] == "literal" for choice in schema["expected"]]
    if choices or kind == "literal":
        choices = choices or re.findall("'([^']*)'", details["ctx"]["expected"])
        nearest = did_you_mean(str(details["input"]), map(str, choices))
        several, only = Wording("not one of the choices", nearest), f"'{choices[0]}'"
        words.append(several if len(choices) > 1 else Wording(f"not {only}", f"write {only}."))
    phrases, fixes = (list(dict.fromkeys(texts)) for texts in zip(*words, strict=True))
    *others, last = fixes
    return Wording(" and ".join(phrases), ", or ".join([*(fix.rstrip(".") for fix in others), last]))


def message_of(details: Any) -> str:
    """The message of an error without words here."""
    message = str(details["msg"])
    own = message.removeprefix("Value error, ")
    return own if own != message else message[:1].lower() + message[1:]
