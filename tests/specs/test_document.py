"""YAML 1.2 with positions; every mistake names file and line."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from ruamel.yaml import YAML

from specs import document
from specs.document import MAX_BYTES, override, parse, read
from specs.errors import SpecError


def test_scalars_follow_yaml_1_2() -> None:
    data = parse(
        "lr: 1e-4\nrun: 12:30\nflag: yes\nreal: true\nnothing: null\ncount: 4_096\ntext: '12'\noct: 010\n",
        "f",
    ).data
    assert data == {
        "lr": 1e-4,
        "run": "12:30",
        "flag": "yes",
        "real": True,
        "nothing": None,
        "count": 4096,
        "text": "12",
        "oct": 10,
    }


def test_a_repeated_key_is_an_error_with_both_lines() -> None:
    with pytest.raises(SpecError) as caught:
        parse("name: a\nstages: {}\nname: b\n", "file.yaml")
    assert str(caught.value) == "file.yaml:3: name: this key is already on line 1. Fix: keep one of the two."


@pytest.mark.parametrize("text", ["a: [1, 2\n", "a: 'x\n", "- a\n- b\n", "", "just text"])
def test_document_that_is_not_a_mapping_is_refused(text: str) -> None:
    with pytest.raises(SpecError, match=r"f\.yaml"):
        parse(text, "f.yaml")


def test_reading_never_makes_an_object() -> None:
    data = parse("a: !!python/object/apply:os.system ['true']\n", "f").data
    assert data == {"a": ["true"]}


def test_aliases_that_multiply_are_refused() -> None:
    levels = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    levels += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 8)]
    with pytest.raises(SpecError, match="more than"):
        parse("\n".join(levels), "f")


def nested(levels: int) -> str:
    return "[" * levels + "]" * levels


DEEP = ["stages=&s {self: *s}", "stages=&s [[*s]]", "a=&a {b: [*a]}", f"a={nested(102)}", f"a={nested(5000)}"]


@pytest.mark.parametrize("assignment", DEEP)
def test_too_deep_nesting_is_refused(assignment: str) -> None:
    with pytest.raises(
        SpecError, match=r"^f.*: brackets or blocks inside each other, more than 100, too deep to read"
    ):
        parse(assignment.replace("=", ": ", 1), "f")
    with pytest.raises(SpecError, match=r"^--set .*(too deep to read|is not YAML)"):
        override(parse("stages: {}\na: {}", "f"), assignment)


def test_reading_stops_at_a_limit_of_values(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(document, "MAX_VALUES", 1000)
    text, begun = "".join(f"{number}: 0\n" for number in range(400_000)), time.process_time()
    with pytest.raises(SpecError, match="more than 100000 values"):
        parse(text, "f")
    assert time.process_time() - begun < 5  # all of them take a minute


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("9" * 400, r"^f:1: a\[0\]: '9+\.\.\.9+' does not fit into 64 bits\. Fix: write a smaller one\.$"),
        ("-" + "9" * 5000, "does not fit into 64 bits"),
        ("1_" * 50 + "1", "does not fit into 64 bits"),
        (str(2**64), "'18446744073709551616' does not fit into 64 bits"),
        ("1e999", r"^f:1: a\[0\]: '1e999' is too large for a number"),
        ("9" * 400 + ".0", "is too large for a number"),
        ('"\\ud800"', r"^f:1: not YAML: found invalid Unicode character escape code"),
        ('{"\\udfff": 1}', r"^f:1: not YAML: found invalid Unicode character escape code"),
    ],
)
def test_impossible_value_is_refused_at_its_field(value: str, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        parse(f"a: [{value}]", "f")


def test_half_of_a_character_in_an_override_is_refused() -> None:
    with pytest.raises(SpecError, match=r"the value '\\udcff' is not YAML\. Fix: quote it"):
        override(parse("a: 1", "f"), "a=\udcff")


def test_largest_number_is_accepted() -> None:
    assert parse(f"a: {2**63 - 1}\nb: -{2**63 - 1}\nc: 1.7e308", "f").data == {
        "a": 2**63 - 1,
        "b": 1 - 2**63,
        "c": 1.7e308,
    }


def test_only_a_regular_file_is_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.yaml")
    (tmp_path / "long.yaml").write_bytes(b" " * (MAX_BYTES + 1))
    (tmp_path / "latin.yaml").write_bytes(b"name: \xe9")
    for name, message in (
        ("pipe", "a named pipe, not a regular file"),
        ("long", "4,194,305 bytes"),
        ("latin", "can't decode byte"),
    ):
        with pytest.raises(SpecError, match=rf"{name}\.yaml: cannot read the file: .*{message}"):
            read(tmp_path / f"{name}.yaml")
    with pytest.raises(SpecError, match="a folder, not a regular file"):
        read(tmp_path)


def test_lines_are_known_for_every_path() -> None:
    found = parse("a:\n  b:\n    - x\n    - {c: 1}\n", "f.yaml")
    assert found.where(("a", "b", 1, "c")) == "f.yaml:4"
    assert found.where(("a", "unknown")) == "f.yaml:1"


def test_a_second_document_is_refused_where_it_begins() -> None:
    with pytest.raises(SpecError) as caught:
        parse("name: a\n---\nname: b\n", "f.yaml")
    assert (
        str(caught.value)
        == "f.yaml:2: a second document begins here. Fix: write one to a file, without another ---."
    )


def test_an_override_sets_a_value_of_its_yaml_type() -> None:
    found = parse("a: {b: 1}\nlist: [1, 2]\n", "f")
    override(found, "a.b=2e-4")
    override(found, "a.c.d=[x, 1]")
    override(found, "list.1=7")
    override(found, "list[0]=6")
    assert found.data == {"a": {"b": 2e-4, "c": {"d": ["x", 1]}}, "list": [6, 7]}


@pytest.mark.parametrize("assignment", ["nothing", "a..b=1", "=1", "a.b.c=1", "list.9=1", "a.b=[1"])
def test_an_override_that_matches_nothing_is_an_error(assignment: str) -> None:
    with pytest.raises(SpecError, match="--set"):
        override(parse("a: {b: 1}\nlist: [1, 2]\n", "f"), assignment)


MERGED = """\
base: &base {lr: 1e-3, betas: [0.9, 0.95], schedule: {warmup: 1}}
other: &other
  lr: 2e-3
  seed: 7
one: {<<: *base, lr: 5e-4}
several:
  <<: [*other, *base]
  name: x
nested: &nested {<<: *base}
through: {<<: *nested}
text: {"<<": 1}
"""


def test_merge_keys_take_over_fields_that_are_not_stated() -> None:
    data = parse(MERGED, "f.yaml").data
    assert data["one"] == {"lr": 5e-4, "betas": [0.9, 0.95], "schedule": {"warmup": 1}}
    assert data["several"] == {
        "lr": 2e-3,
        "seed": 7,
        "betas": [0.9, 0.95],
        "schedule": {"warmup": 1},
        "name": "x",
    }
    assert data["through"] == data["base"]
    assert data["text"] == {"<<": 1}
    plain = YAML(typ="safe").load(MERGED.replace('text: {"<<": 1}\n', ""))
    assert {name: value for name, value in data.items() if name != "text"} == plain


def test_a_merged_field_has_its_own_line_and_is_overridden_alone() -> None:
    merged = parse(MERGED, "f.yaml")
    assert merged.where(("several", "seed")) == "f.yaml:4"
    override(merged, "one.schedule.warmup=3")
    assert merged.data["one"]["schedule"] == {"warmup": 3}
    assert merged.data["base"]["schedule"] == {"warmup": 1}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: {<<: 3}", "f.yaml:1: a: << merges mappings only. Fix: write <<: *name"),
        ("a: {<<: [{b: 1}, text]}", "f.yaml:1: a: << merges mappings only"),
        ("a: &a {<<: *a}", "is an alias inside what it names"),
        ("a: {<<: {b: 1}, b: 2, b: 3}", "a.b: this key is already on line 1"),
        (
            "a0: &a0 {x: 1}\n"
            + "".join(f"a{i}: &a{i} {{<<: [{', '.join([f'*a{i - 1}'] * 10)}]}}\n" for i in range(1, 9)),
            "do aliases repeat each other?",
        ),
    ],
)
def test_merge_keys_that_cannot_be_read_are_refused(text: str, message: str) -> None:
    with pytest.raises(SpecError) as caught:
        parse(text, "f.yaml")
    assert message in str(caught.value)
