"""The metrics that an evaluation of a reward has."""

from __future__ import annotations

from typing import Any

from specs.rewards import RewardSpec
from specs.stages.evaluate_reward import EvaluateRewardPart


def names(reward: Any) -> set[str]:
    spec = RewardSpec.model_validate(reward)
    part = EvaluateRewardPart(reward=spec, split="validation", seed=0, source_names=["chat/pairs"])
    return set(part.metrics())


def test_only_a_judge_has_mass_outside_and_only_one_that_compares_an_order() -> None:
    judge = {"from": "sft", "constitution": "c"}
    plain, judged = names("grounded-answer"), names({"judge": judge})
    compared = names({"judge": judge | {"pairwise": {}}})
    assert {"pairs", "accuracy/low", "ties", "length_bias/high", "accuracy/source/chat/pairs"} <= plain
    assert judged - plain == {"outside", "outside_max"}
    assert compared - judged == {
        f"{name}{end}"
        for name in ("accuracy/compared", "order_bias", "order_consistency")
        for end in ("", "/low", "/high")
    }
