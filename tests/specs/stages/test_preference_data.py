"""How completions are sampled, and of which prompts."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from specs.stages.preference_data import Generator, Personas, PreferenceDataStage, Sampling


@pytest.mark.parametrize("temperature", [0.0, 0.01, 1.0, 4.0])
def test_a_temperature_is_zero_or_divides_logits(temperature: float) -> None:
    assert Sampling(max_new_tokens=1, temperature=temperature).temperature == temperature


@pytest.mark.parametrize("temperature", [1e-300, 0.0099])
def test_a_temperature_by_which_logits_overflow_is_refused(temperature: float) -> None:
    with pytest.raises(ValidationError, match=r"overflow; set 0, which is greedy, or 0\.01 or more"):
        Sampling(max_new_tokens=1, temperature=temperature)


def test_expected_lengths_are_possible_and_no_part_of_what_is_sampled() -> None:
    expected = Sampling(max_new_tokens=8, expected_tokens=8, expected_prompt_tokens=100)
    assert expected.identity_fields() == Sampling(max_new_tokens=8).identity_fields()
    with pytest.raises(ValidationError, match="expected_tokens 9 is above max_new_tokens 8; set 8 or less"):
        Sampling(max_new_tokens=8, expected_tokens=9)


def test_a_part_of_prompts_is_named_once() -> None:
    fields = {
        **{"kind": "preference_data", "from": "sft", "reward": "reference-overlap"},
        **{"completions": {"max_new_tokens": 1}, "prompts": ["chat/a", "chat/b", "chat/a"]},
    }
    with pytest.raises(ValidationError, match="a part is repeated; name it once"):
        PreferenceDataStage.model_validate(fields)


SERVER = {"engine": "server", "server": {"url": "http://host/v1", "model": "big", "api": "chat"}}


@pytest.mark.parametrize(
    ("stated", "told"),
    [
        ({"completions": {"max_new_tokens": 1}}, "a generator has from:, or a server with api: chat"),
        ({"from": "sft", "completions": {"max_new_tokens": 1, **SERVER}}, "set one"),
    ],
)
def test_a_generator_has_one_model(stated: dict[str, Any], told: str) -> None:
    with pytest.raises(ValidationError, match=told):
        Generator.model_validate(stated)


@pytest.mark.parametrize(
    ("stated", "told"),
    [
        ({"format": "chat"}, "personas are texts, and format chat has none; use jsonl, or text"),
        ({"format": "jsonl", "template": "You are."}, "a template without {persona} is the same for all"),
    ],
)
def test_personas_are_texts_in_a_template(stated: dict[str, Any], told: str) -> None:
    with pytest.raises(ValidationError, match=told):
        Personas(url="x", **stated)


def test_where_personas_lie_is_no_part_of_what_is_sampled() -> None:
    one, two = (Personas(url=url, format="jsonl") for url in ("here", "there"))
    assert one.identity_fields() == two.identity_fields() == {"format": "jsonl", "seed": 28}
