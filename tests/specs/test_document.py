"""YAML 1.2 with positions; every mistake names file and line."""

from __future__ import annotations

import pytest

from specs.document import override, parse
from specs.errors import SpecError, nearest


def test_scalars_follow_yaml_1_2() -> None:
    data = parse("lr: 1e-4\nrun: 12:30\nflag: yes\nreal: true\nnothing: null\ncount: 4_096\ntext: '12'\noct: 010\n", "f").data
    assert data == {"lr": 1e-4, "run": "12:30", "flag": "yes", "real": True, "nothing": None, "count": 4096, "text": "12", "oct": 10}


def test_a_repeated_key_is_an_error_with_both_lines() -> None:
    with pytest.raises(SpecError) as caught:
        parse("name: a\nstages: {}\nname: b\n", "file.yaml")
    assert str(caught.value) == "file.yaml:3: name: this key stands on line 1 already. Fix: keep one of the two."


@pytest.mark.parametrize("text", ["a: [1, 2\n", "a: 'x\n", "- a\n- b\n", "", "just text"])
def test_what_is_not_a_mapping_is_refused(text: str) -> None:
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


def test_lines_are_known_for_every_path() -> None:
    document = parse("a:\n  b:\n    - x\n    - {c: 1}\n", "f.yaml")
    assert document.where(("a", "b", 1, "c")) == "f.yaml:4"
    assert document.where(("a", "unknown")) == "f.yaml:1"


def test_a_second_document_is_refused_where_it_begins() -> None:
    with pytest.raises(SpecError) as caught:
        parse("name: a\n---\nname: b\n", "f.yaml")
    assert str(caught.value) == "f.yaml:2: a second document begins here. Fix: write one to a file, without another ---."


def test_suggestions_name_each_candidate_once() -> None:
    assert nearest("x", ["main", "corpus", "main"]) == "use one of corpus, main."


def test_an_override_sets_a_value_of_its_yaml_type() -> None:
    document = parse("a: {b: 1}\nlist: [1, 2]\n", "f")
    override(document, "a.b=2e-4")
    override(document, "a.c.d=[x, 1]")
    override(document, "list.1=7")
    assert document.data == {"a": {"b": 2e-4, "c": {"d": ["x", 1]}}, "list": [1, 7]}


@pytest.mark.parametrize("assignment", ["nothing", "a..b=1", "=1", "a.b.c=1", "list.9=1", "a.b=[1"])
def test_an_override_that_matches_nothing_is_an_error(assignment: str) -> None:
    with pytest.raises(SpecError, match="--set"):
        override(parse("a: {b: 1}\nlist: [1, 2]\n", "f"), assignment)
