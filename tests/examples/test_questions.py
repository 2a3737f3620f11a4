from __future__ import annotations

import io
import json
from collections import Counter
from pathlib import Path

import pytest

from apertus_model.chat.messages import blocks_of, normalise
from apertus_model.data.conversations.readers import read_conversations
from apertus_model.data.conversations.stored import Conversation
from apertus_model.data.documents.readers import Rejection, open_source
from examples.questions import clean_sentence, function_questions, labelled_answers, module_name
from specs.sources import SourceSpec

PYTHON = '''
"""Module."""
raise SystemExit("this file is read, not run")
def scale(values, /, factor=2, *rest, copy: bool = True, strict, **options) -> list:
    """Multiply all values by a factor.

    More about it.
    """
if True:
    class Box:
        """Not a function."""
        def open(self, lid="top"):
            """Open the box at its lid"""
        @staticmethod
        def count(boxes):
            """Count the boxes that are given. Quickly."""
        @property
        def size(self):
            """The size of the whole box."""
        def _hidden(self):
            """Nobody asks about this one."""
def undocumented(): pass
def terse():
    """f() -> x"""
'''


def _source(url: str) -> SourceSpec:
    return SourceSpec(
        url=url, format="conversations", reader="examples.questions:function_questions", version=1
    )


def _questions(python: str, module: str) -> list[Conversation | Rejection]:
    return list(
        function_questions(io.BytesIO(python.encode()), _source("/folder"), module.replace(".", "/") + ".py")
    )


def _asked(module: str = "tools.boxes") -> tuple[dict[str, Conversation], Counter[str]]:
    found = _questions(PYTHON, module)
    rejected = Counter(item.reason for item in found if isinstance(item, Rejection))
    return {item.id: item for item in found if isinstance(item, Conversation)}, rejected


def test_public_documented_functions_are_asked_about() -> None:
    asked, rejected = _asked()
    assert {item.group for item in asked.values()} == {
        "tools.boxes.scale",
        "tools.boxes.Box.open",
        "tools.boxes.Box.count",
    }
    assert rejected == {"no_docstring": 1, "no_clean_sentence": 1, "property": 1}
    kinds = {"purpose", "arguments", "call", "sentence", "search", "dialogue", "help"}
    assert {name.rsplit("/")[1] for name in asked} == kinds
    assert len(asked) == 3 * len(kinds)


def test_answers_are_what_the_source_says() -> None:
    asked, _ = _asked()
    signature = "`tools.boxes.scale(values, /, factor=2, *rest, copy: bool=True, strict, **options) -> list`"
    call = asked["tools.boxes.scale/call"]
    assert call.messages[-1]["content"] == f"Call it as {signature}. Multiply all values by a factor."
    assert call.completions == [call.messages[-1]["content"]]
    assert (
        asked["tools.boxes.scale/arguments"].messages[-1]["content"]
        == "`tools.boxes.scale` takes 6 arguments: `values`, `factor` (default `2`), `*rest`, `copy` (default"
        " `True`), `strict` and `**options`. Multiply all values by a factor."
    )
    required = "You must give `values` and `strict`; the other 4 may be left out."
    assert asked["tools.boxes.scale/dialogue"].messages[-1]["content"] == required
    assert asked["tools.boxes.scale/sentence"].metadata == {
        "function": "tools.boxes.scale",
        "parameters": ["values", "factor", "*rest", "copy", "strict", "**options"],
        "summary": "Multiply all values by a factor.",
    }
    assert (
        asked["tools.boxes.Box.open/call"].messages[-1]["content"]
        == "Call it as `tools.boxes.Box.open(lid='top')`. Open the box at its lid."
    )
    assert (
        asked["tools.boxes.Box.count/dialogue"].messages[-1]["content"]
        == "You must give `boxes`, and there are no others."
    )


def test_a_label_prefers_the_documented_answer_to_that_of_another_function() -> None:
    found = list(labelled_answers(io.BytesIO(PYTHON.encode()), _source("/folder"), "m.py"))
    pairs = [one for one in found if isinstance(one, Conversation)]
    answers = [pair.completions for pair in pairs]
    assert [pair.id for pair in pairs] == [
        f"m.{name}/labelled" for name in ("scale", "Box.open", "Box.count")
    ]
    assert all(pair.preference and pair.completions[0] != pair.completions[1] for pair in pairs)
    assert [rejected for _, rejected in answers] == [chosen for chosen, _ in [*answers[1:], answers[0]]]
    assert Counter(type(one) for one in found)[Rejection] > 0


def test_a_look_up_calls_the_tool_and_reads_its_output() -> None:
    asked, _ = _asked()
    found = asked["tools.boxes.Box.count/help"]
    assert found.tools is not None
    assert found.tools[0]["function"]["name"] == "help"
    blocks = {block["type"]: block for block in blocks_of(found.messages[-1])}
    assert blocks["tool_calls"]["calls"] == [{"name": "help", "arguments": {"name": "tools.boxes.Box.count"}}]
    assert blocks["tool_outputs"]["outputs"] == [
        "tools.boxes.Box.count(boxes)\nCount the boxes that are given."
    ]
    assert "Count the boxes that are given." in blocks["response"]["text"]
    assert found.completions == []


def test_the_same_file_gives_the_same_questions_in_normal_form() -> None:
    asked, _ = _asked()
    assert asked == _asked()[0]
    for conversation in asked.values():
        assert normalise(conversation.messages) == conversation.messages


def test_private_modules_are_not_asked_about() -> None:
    assert _asked("tools._boxes") == ({}, Counter())
    assert _questions("def f(:", "m") == [Rejection("not_python")]


@pytest.mark.parametrize(
    ("docstring", "sentence"),
    [
        ("Return the sum of both. More follows.", "Return the sum of both."),
        ("Return the sum\n    of both values\n\nMore.", "Return the sum of both values."),
        ("Return a value, e.g. the sum of both.", "Return a value, e.g. the sum of both."),
        ("Don't stop at the first line.", "Don't stop at the first line."),
        ("Too short.", None),
        ("lower case is no sentence here.", None),
        ("F(x) -> the sum of all", None),
        ("Return the sum of (both values.", None),
        ("Return the following things at once:", None),
        ("Return " + "very " * 50 + "much.", None),
        ("", None),
    ],
)
def test_only_sentences_that_stand_alone_are_answers(docstring: str, sentence: str | None) -> None:
    assert clean_sentence(docstring) == sentence


@pytest.mark.parametrize(
    ("url", "path", "name"),
    [
        ("installed:stdlib", "json/__init__.py", "json"),
        ("installed:stdlib", "xml/etree/ElementTree.py", "xml.etree.ElementTree"),
        ("installed:numpy", "linalg/__init__.py", "numpy.linalg"),
        ("installed:numpy", "__init__.py", "numpy"),
        ("installed:numpy/linalg", "linalg.py", "numpy.linalg.linalg"),
        ("/some/folder", "shutil.py", "shutil"),
    ],
)
def test_modules_are_named_as_they_are_imported(url: str, path: str, name: str) -> None:
    assert module_name(url, path) == name


def test_the_standard_library_answers_with_its_own_signatures() -> None:
    source = _source("installed:stdlib")
    found = {
        item.id: item
        for item in read_conversations(
            source, *open_source(source), f"{Path(json.__file__).parent.name}/__init__.py"
        )
        if isinstance(item, Conversation)
    }
    answer = found["json.loads/call"].messages[-1]["content"]
    assert answer.startswith("Call it as `json.loads(s, *, cls=None, object_hook=None")
