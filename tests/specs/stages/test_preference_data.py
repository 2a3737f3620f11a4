"""How completions are sampled, and of which prompts."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from specs.stages.preference_data import PreferenceDataStage, Sampling


@pytest.mark.parametrize("temperature", [0.0, 0.01, 1.0, 4.0])
def test_a_temperature_is_zero_or_divides_logits(temperature: float) -> None:
    assert Sampling(max_new_tokens=1, temperature=temperature).temperature == temperature


@pytest.mark.parametrize("temperature", [1e-300, 0.0099])
def test_a_temperature_by_which_logits_overflow_is_refused(temperature: float) -> None:
    with pytest.raises(ValidationError, match=r"overflow; state 0, which is greedy, or 0\.01 or more"):
        Sampling(max_new_tokens=1, temperature=temperature)


def test_a_part_of_prompts_is_named_once() -> None:
    fields = {
        **{"kind": "preference_data", "from": "sft", "reward": "reference-overlap"},
        **{"completions": {"max_new_tokens": 1}, "prompts": ["chat/a", "chat/b", "chat/a"]},
    }
    with pytest.raises(ValidationError, match="a part is repeated; name it once"):
        PreferenceDataStage.model_validate(fields)
