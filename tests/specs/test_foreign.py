"""JSON of others: what is read, and what is refused with the field, in a bounded time."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from specs import foreign
from specs.foreign import Foreign, ForeignError, checked, parse_json, read_local, shown


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "it is not JSON: Expecting value"),
        (b'{"a": 1', "it is not JSON: Expecting"),
        (b'{"a": [1, NaN]}', r"^a\[1\] is 'NaN', which is not a finite number$"),
        (b'{"a": {"b": -Infinity}}', r"^a\.b is '-Infinity', which is not a finite number$"),
        (b'{"a": 1e999}', r"^a is '1e999', which is not a finite number$"),
        (b'{"a": %s}' % (b"9" * 400), r"^a is '9+\.\.\.9+', a number of 400 digits; the limit is 40$"),
        (b'{"a": -%s}' % (b"9" * 5000), "a number of 5001 digits"),
        (b'{"a": 1, "b": 2, "a": 3}', "the key 'a' is repeated"),
        (b'{"a": "\\ud800"}', r"^a is '\\ud800', which has half of a character"),
        (b'{"\\udfff": 1}', "has half of a character"),
        (b'{"a": "\x00"}', "it is not JSON: Invalid control character"),
        (b"\xef\xbb\xbf{}", "byte order mark"),
        ('{"a": 1}'.encode("utf-16"), "byte order mark"),
        ('{"a": 1}'.encode("utf-16-le"), "it is not JSON"),
        ('{"a": "é"}'.encode("latin-1"), "byte 7 is not UTF-8"),
        (b"[" * 101 + b"]" * 101, "more than 100 brackets inside each other"),
        (b'{"a":' * 100_000 + b"1" + b"}" * 100_000, "more than 100 brackets inside each other"),
        (b" " * 101, "it has 101 bytes; the limit is 100"),
    ],
)
def test_anything_but_plain_json_is_refused_with_its_field(data: bytes, message: str) -> None:
    with pytest.raises(ForeignError, match=message):
        parse_json(data, 100 if message.startswith("it has 101") else foreign.MAX_BYTES)


def test_too_many_variants_are_refused_before_expansion() -> None:
    assert parse_json(b"[[],[],[],[]]", values=10) == [[], [], [], []]
    with pytest.raises(ForeignError, match="more than 10 values"):
        parse_json(b"[[],[],[],[],[],[]]", values=10)


JSON: st.SearchStrategy[Any] = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**38), 10**38)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
)


@given(JSON)
@example("\U0001f600")
@example({"model_max_length": 1000000000000000019884624838656})
def test_any_json_reads_back_as_it_was_written(document: Any) -> None:
    assert parse_json(json.dumps(document).encode()) == document
    assert parse_json(json.dumps(document, ensure_ascii=False).encode()) == document


@given(st.binary(max_size=60))
def test_any_bytes_give_a_document_or_an_error(data: bytes) -> None:
    try:
        json.dumps(parse_json(data), allow_nan=False).encode()
    except ForeignError as error:
        assert str(error)


class Inner(Foreign):
    number: int = 1


class Outer(Foreign):
    inner: Inner
    ends: int | list[int] | None = None


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ([1], r"it holds \[1\], not an object"),
        ({}, "^inner is missing$"),
        ({"inner": {"number": "1"}}, r"^inner\.number is '1': not a whole number$"),
        ({"inner": {"number": True}}, r"^inner\.number is true: not a whole number$"),
        (
            {"inner": {}, "ends": {}},
            r"^ends is {}: not a whole number, or not a list$",
        ),
        ({"inner": {"number": "x" * 10_000}}, r"^inner\.number is 'x{30,}\.\.\.x{30,}': not a"),
    ],
)
def test_a_field_of_another_type_is_named_with_its_value(document: Any, message: str) -> None:
    with pytest.raises(ForeignError, match=message):
        checked(Outer, document)


def fifo(path: Path) -> None:
    os.mkfifo(path)


def unix_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as opened:
        os.chdir(path.parent)  # the name of a socket is short
        opened.bind(path.name)


@pytest.mark.parametrize(
    ("make", "what"),
    [
        (Path.mkdir, "a folder"),
        (fifo, "a named pipe"),
        (unix_socket, "a socket"),
        (lambda path: path.symlink_to("/dev/zero"), "a device"),
    ],
)
def test_only_regular_files_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make: Callable[[Path], None], what: str
) -> None:
    monkeypatch.chdir(tmp_path)
    make(tmp_path / "file")
    with pytest.raises(ForeignError, match=f"it is {what}, not a regular file"):
        read_local(tmp_path / "file")


def test_too_long_file_is_refused_before_it_is_read(tmp_path: Path) -> None:
    with open(tmp_path / "file", "wb") as file:
        file.truncate(2**40)
    with pytest.raises(ForeignError, match="1,099,511,627,776 bytes"):
        read_local(tmp_path / "file")


def test_shown_value_has_one_line() -> None:
    assert len(shown({"a": ["x" * 10_000] * 100, "b": 10**1000})) < 800
