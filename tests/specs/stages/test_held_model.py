"""The GPUs of a worker, by the model that each kind of part holds."""

from __future__ import annotations

from typing import Any

import pytest

from specs.launch import Launch, Parallel
from specs.rewards import RewardSpec
from specs.stages.base import Part
from specs.stages.classifier import Encoder, FeaturesPart
from specs.stages.corpus import CorpusPart
from specs.stages.evaluate_reward import EvaluateRewardPart
from specs.stages.harness import HarnessPart, Suite
from specs.stages.memorisation import ContinuationsPart
from specs.stages.preference_data import CompletionsPart, RewardsPart, Sampling

SERVER = {"url": "http://host/v1", "model": "theirs", "api": "chat"}
SUITE = Suite(tasks=["x"])


def sampling(engine: str, **more: Any) -> Sampling:
    return Sampling.model_validate({"max_new_tokens": 8, "engine": engine, **more})


def judge(**settings: Any) -> RewardSpec:
    return RewardSpec.model_validate({"judge": {"constitution": "rules.md", **settings}})


@pytest.mark.parametrize(
    ("part", "role", "gpus"),
    [
        (CompletionsPart.model_construct(sampling=sampling("transformers")), "model", 1),
        (CompletionsPart.model_construct(sampling=sampling("vllm")), "model", 4),
        (CompletionsPart.model_construct(sampling=sampling("server", server=SERVER)), None, 0),
        (ContinuationsPart.model_construct(sampling=sampling("vllm")), "model", 4),
        (HarnessPart.model_construct(suite=SUITE), "model", 4),
        (HarnessPart.model_construct(suite=SUITE, engine="vllm"), "model", 4),
        (RewardsPart.model_construct(reward=RewardSpec(function="grounded-answer")), None, 0),
        (RewardsPart.model_construct(reward=RewardSpec(model="s3://bucket/judge")), "reward_model", 1),
        (RewardsPart.model_construct(reward=judge(**{"from": "hf:judge"})), "judge", 1),
        (RewardsPart.model_construct(reward=judge(**{"from": "hf:judge"}, engine="vllm")), "judge", 4),
        (RewardsPart.model_construct(reward=judge(server=SERVER, revision="1")), None, 0),
        (EvaluateRewardPart.model_construct(reward=judge(**{"from": "hf:judge"})), "judge", 1),
        (FeaturesPart.model_construct(encoder=None), None, 0),
        (FeaturesPart.model_construct(encoder=Encoder.model_construct()), "encoder", 1),
        (CorpusPart.model_construct(), None, 0),
    ],
)
def test_a_worker_has_the_gpus_of_the_model_that_it_holds(part: Part, role: str | None, gpus: int) -> None:
    held = part.held_model
    assert (held.role if held is not None else None) == role
    assert part.gpus_of_worker(Launch(processes=4, parallel=Parallel(tp=4))) == gpus
