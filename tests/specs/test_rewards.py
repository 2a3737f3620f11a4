"""A reward has a version and a single source."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from specs.rewards import REWARDS, RewardSpec


@pytest.mark.parametrize("name", REWARDS)
def test_our_reward_is_known_by_its_name_and_version(name: str) -> None:
    stated = RewardSpec.model_validate(name)
    assert stated == RewardSpec(function=name) == RewardSpec(function=name, version=REWARDS[name])
    assert stated.identity_fields() == {"function": name, "version": REWARDS[name]}


def test_a_reward_of_a_package_is_known_by_its_stated_version() -> None:
    fields = {"function": "package.module:name", "version": 3}
    assert RewardSpec.model_validate(fields).identity_fields() == fields


@pytest.mark.parametrize(
    ("stated", "message"),
    [
        ({}, "set one of function, model, from"),
        ({"function": "grounded-answer", "model": "/folder"}, "set one of function, model, from"),
        ({"judge": {"from": "sft", "constitution": "c"}, "model": "/folder"}, "function, model, from, judge"),
        ({"function": "grounded-answer", "version": 9}, "has version 1 here, not 9; leave version out"),
        ("best-answer", "there is no reward 'best-answer'; use one of grounded-answer, reference-overlap"),
        ("package:name", "states no version; add version: 1"),
        ({"function": "grounded-answer", "parameters": 7}, "parameters are those of a model's folder"),
        ({"model": "https://user:secret@host/x"}, "credentials"),
    ],
)
def test_a_wrong_reward_is_refused_with_the_fix(stated: Any, message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        RewardSpec.model_validate(stated)
