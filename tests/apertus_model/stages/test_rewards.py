from __future__ import annotations

import statistics
from typing import Any

import pytest

from apertus_model.data.rows import Rows
from apertus_model.rewards import RewardError
from apertus_model.stages.rewards import RewardSummary
from infra.store import Artifact
from tests.apertus_model.preference_artifacts import put_rows


def _inputs(bench: Any, *, answers: list[str | None]) -> dict[str, Artifact]:
    prompts, completions = [], []
    for index, answer in enumerate(answers):
        messages = [{"role": "user", "content": f"question {index}"}]
        own = [{"text": answer, "tokens": [7]}] if answer else []
        more = {
            "messages": messages,
            "text": f"question {index}",
            "answer": answer,
            "metadata": {},
            "completions": own,
        }
        prompts.append({"id": f"p{index}", "tokens": [1], **more})
        sampled = [("red house", True), ("red", False), ("red", False)]
        texts = [
            {"text": text, "tokens": [8, number], "finished": finished}
            for number, (text, finished) in enumerate(sampled)
        ]
        completions.append({"id": f"p{index}", "completions": texts})
    return {
        "prompts": put_rows(bench, "prompts", "p", prompts),
        "completions": put_rows(bench, "completions", "c", completions),
    }


def _spec(function: str, **more: Any) -> dict[str, Any]:
    return {"reward": {"function": function, "model": None}, **more}


def test_offline_and_sampled_completions_are_scored(bench: Any) -> None:
    artifact = bench.run(
        "rewards",
        "r",
        _spec("reference-overlap"),
        _inputs(bench, answers=["red house", "green"]),
    )
    red = (2 * 1 / 3 + 0) / 2
    assert list(Rows(artifact)) == [
        {"id": "p0", "offline": [1.0], "sampled": [1.0, red, red]},
        {"id": "p1", "offline": [1.0], "sampled": [0.0, 0.0, 0.0]},
    ]
    sampled = [1.0, red, red, 0.0, 0.0, 0.0]
    assert artifact.manifest.metrics == {
        "offline": 2,
        "sampled": 6,
        "prompts_with_equal_rewards": 0,
        "mean_offline": 1.0,
        "mean_sampled": pytest.approx(statistics.mean(sampled)),
        "standard_deviation": pytest.approx(statistics.pstdev(sampled)),
        "standard_deviation_within": pytest.approx(statistics.pstdev(sampled[:3]) / 2),
        "ties": (1 + 3) / 6,
    }


def test_prompts_whose_completions_all_have_the_same_reward_are_counted(bench: Any) -> None:
    rows = [([0.5], [0.5, 0.5]), ([0.5], [0.4, 0.4]), ([], [1.0, 1.0]), ([], [1.0])]  # the last has no other
    summary = RewardSummary()
    for offline, sampled in rows:
        summary.add({"offline": offline, "sampled": sampled})
    assert summary.metrics()["prompts_with_equal_rewards"] == 2


def test_units_do_not_change_the_rewards(bench: Any) -> None:
    inputs = _inputs(bench, answers=["red house", "green", "blue house"])
    one = bench.run(
        "rewards",
        "one",
        _spec("grounded-answer", prompts_per_unit=1),
        inputs,
    )
    many = bench.run(
        "rewards",
        "many",
        _spec("grounded-answer", prompts_per_unit=64),
        inputs,
    )
    assert one.bytes("rewards-00000.jsonl") == many.bytes("rewards-00000.jsonl")
    assert one.manifest.metrics == many.manifest.metrics


def test_whether_a_completion_ended_reaches_the_reward(bench: Any) -> None:
    [row] = Rows(
        bench.run(
            "rewards",
            "r",
            _spec("grounded-answer"),
            _inputs(bench, answers=["red"]),
        )
    )
    assert row["offline"][0] - row["sampled"][1] == pytest.approx(0.25)


def test_a_prompt_that_cannot_be_scored_is_named(bench: Any) -> None:
    with pytest.raises(RewardError, match=r"prompt p1 \('question 1'\): there is nothing to compare with"):
        bench.run(
            "rewards",
            "r",
            _spec("grounded-answer"),
            _inputs(bench, answers=["red", None]),
        )
