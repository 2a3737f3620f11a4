from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
from jinja2 import TemplateError
from transformers import PreTrainedTokenizerFast
from transformers.utils.chat_template_utils import render_jinja_template

from apertus_model import template_process
from apertus_model.template_process import Bounds
from apertus_model.tokenizer_files import ChatTemplateError, open_folder
from tests.apertus_model.other_models import KINDS, other_folder

CHAT = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "is \u65e5\u672c \U0001f917 <|im_end|> text?"},
    {"role": "assistant", "content": "yes"},
]
LARGE = "9" * 10
# What a template can ask for much of, in a few characters. {n}: how much.
EXPRESSIONS = [
    *(f"{literal} * {{n}}" for literal in ("'a'", "[1]", "(1,)", "[[1] * 9]")),
    *(f"'%{form}' % 1" for form in ("{n}d", ".{n}f", "0{n}x")),
    *("'{:>{n}}'.format(1)", "'a'.ljust({n})", "'1'.zfill({n})", "'a'.center({n})", "'a'|center({n})"),
    *("range({n})|list", "range({n})|join", "range({n})|map('string')|list|tojson", "9 ** (9 ** {n})"),
    *("'a'|indent({n})", "[1]|batch({n}, 'a')|list|tojson", "'a' | list | slice({n}) | list"),
    "('a' * 99999).replace('a', 'a' * 99999)",
]
DOUBLED = ["x.x ~ x.x", "x.x + x.x", "[x.x, x.x]|join", "x.x.replace('a', 'aa')", "x.x|replace('a', 'aa')"]
TEMPLATES = [
    *("{{ " + expression.replace("{n}", LARGE) + " }}" for expression in EXPRESSIONS),
    *(
        "{% set x = namespace(x='a') %}{% for _ in range(99) %}{% set x.x = " + doubled + " %}{% endfor %}"
        for doubled in DOUBLED
    ),
    "{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}",
    "{% for x in [[1]] recursive %}{{ loop([[1]]) }}{% endfor %}",
    "{% for x in range(99999) %}{{ 'a' * 9999 }}{% endfor %}",
]
ENDLESS = [
    *("{% for x in range(99999) %}" * depth + "{% endfor %}" * depth for depth in (2, 3)),
    "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(99) }}",
]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return open_folder(other_folder(tmp_path_factory.mktemp("model") / "theirs", "Qwen3ForCausalLM"))


def _render(tokenizer: Any, template: str, **arguments: Any) -> str:
    text: str = tokenizer.apply_chat_template(CHAT, chat_template=template, tokenize=False, **arguments)
    return text


def test_a_template_gives_the_text_that_transformers_gives(tokenizer: PreTrainedTokenizerFast) -> None:
    templates = [template for _, _, template in KINDS.values()]
    prompts = itertools.product(
        templates, ({"add_generation_prompt": True}, {"continue_final_message": True})
    )
    for template, arguments in prompts:
        tools = [{"type": "function", "function": {"name": "f"}}]
        given: dict[str, Any] = {"tools": tools, "enable_thinking": False, **arguments}
        expected, _ = render_jinja_template(
            conversations=[CHAT], chat_template=template, **given, **tokenizer.special_tokens_map
        )
        assert _render(tokenizer, template, **given) == expected[0]


@pytest.mark.parametrize("template", TEMPLATES)
def test_a_template_that_asks_for_much_ends_in_an_error_that_names_the_folder(
    tokenizer: PreTrainedTokenizerFast, template: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(template_process, "BOUNDS", Bounds(1.5, 2**27, 2**20))
    bounds = "more than (1.5 seconds|128 MiB of memory|1,048,576 characters)|(Recursion|Overflow|Value)Error"
    with pytest.raises(ChatTemplateError, match=f"the chat template of .*/theirs fails: .*({bounds}).*Fix: "):
        _render(tokenizer, template)


@pytest.mark.parametrize("template", ENDLESS)
def test_a_template_without_end_is_ended_and_the_next_one_is_rendered(
    tokenizer: PreTrainedTokenizerFast, template: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(template_process, "BOUNDS", Bounds(seconds=0.1))
    with pytest.raises(TemplateError, match=r"of .*/theirs fails: it takes more than 0\.1 seconds"):
        _render(tokenizer, template)
    monkeypatch.undo()
    assert _render(tokenizer, "{{ messages|length }}") == "3"


def test_text_up_to_the_bound_is_rendered(
    tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(template_process, "BOUNDS", Bounds(characters=1000))
    assert len(_render(tokenizer, "{{ '\U0001f917' * 1000 }}")) == 1000
    with pytest.raises(TemplateError, match="it writes more than 1,000 characters"):
        _render(tokenizer, "{{ 'a' * 1001 }}")


def test_a_refusal_is_told_in_the_words_of_the_template(tokenizer: PreTrainedTokenizerFast) -> None:
    with pytest.raises(ChatTemplateError, match=r"fails: no tools here\. Fix: "):
        _render(tokenizer, "{{ raise_exception('no tools here') }}")


def test_the_process_is_started_outside_of_the_working_folder_and_ends_with_its_parent(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "json.py").write_text("raise AssertionError('code of the folder is run')")
    monkeypatch.chdir(tmp_path)
    process = template_process._Process()
    assert process.render({"conversations": [CHAT], "chat_template": "{{ 1 + 1 }}"}) == ["2"]
    process._pipe.close()
    assert process._process.wait(timeout=60) == 0
