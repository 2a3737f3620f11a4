"""Agreement of a reward with labelled pairs, from conversations to metrics."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from apertus_model.data.rows import Rows
from apertus_model.rewards import RewardError, Scored
from infra.store import Artifact
from specs.stages.evaluate_reward import EvaluateRewardPart
from tests.apertus_model.other_models import other_folder
from tests.apertus_model.preference_artifacts import attempt_at, dialogue, put_conversations
from tests.apertus_model.rewards.test_classifier import write_classifier


def length(items: Sequence[Scored]) -> list[float]:
    return [float(len(item.completion)) for item in items]


def constant(items: Sequence[Scored]) -> list[float]:
    return [0.25 for _ in items]


def broken(items: Sequence[Scored]) -> list[float]:
    raise ZeroDivisionError("of theirs")


def unknown(items: Sequence[Scored]) -> list[float]:
    return [float("nan") for _ in items]


@pytest.fixture
def pairs(bench: Any, tokenizer: Artifact) -> Artifact:
    """Six pairs, of which the label prefers the longer completion in four; and two that are no pairs."""
    chosen = ["a long answer", "no", "a longer answer", "yes indeed", "maybe so", "I"]
    rejected = ["short", "never at all", "short", "no", "no", "nobody knows"]
    found = [
        dialogue(f"q{index}", *answers, preference=True)
        for index, answers in enumerate(zip(chosen, rejected, strict=True))
    ]
    found += [dialogue("unlabelled", "one", "two"), dialogue("equal", "same", "same", preference=True)]
    return put_conversations(bench, "pairs", tokenizer, found, split="validation")


def spec(name: str, **more: Any) -> dict[str, Any]:
    function = {"function": f"{__name__}:{name}", "version": 1}
    stated = {"reward": function, "split": "validation", "seed": 0, "source_names": ["chat/pairs"]}
    return stated | more


def test_a_reward_is_compared_with_the_labels(bench: Any, pairs: Artifact) -> None:
    artifact = bench.run("evaluate_reward", "e", spec("length"), {"conversations:0": pairs})
    metrics = artifact.manifest.metrics
    assert (metrics["pairs"], metrics["without_label"], metrics["equal_completions"]) == (6, 1, 1)
    assert metrics["accuracy"] == metrics["accuracy/source/chat/pairs"] == pytest.approx(4 / 6)
    assert (metrics["accuracy/longer"], metrics["accuracy/shorter"]) == (1, 0)
    assert metrics["length_bias"] == pytest.approx(1 - 4 / 6)
    assert metrics["accuracy/low"] < 4 / 6 < metrics["accuracy/high"]
    stated = EvaluateRewardPart.model_validate(spec("length")).metrics()
    assert {*metrics} - {"without_label", "equal_completions"} == {*stated}
    rows = {row["id"]: row for row in Rows(artifact)}
    assert rows["q0"]["characters"] == [13, 5] and (rows["q0"]["chosen"], rows["q0"]["rejected"]) == (13, 5)


def test_units_change_nothing_and_a_limit_chooses_by_the_seed(bench: Any, pairs: Artifact) -> None:
    read = {"conversations:0": pairs}
    whole = bench.run("evaluate_reward", "a", spec("length"), read)
    units = bench.run("evaluate_reward", "b", spec("length", pairs_per_unit=1), read)
    assert [*Rows(whole)] == [*Rows(units)]
    limited = bench.run("evaluate_reward", "c", spec("length", limit=5), read)
    assert [*Rows(limited)] == [*Rows(whole)][:5]
    other = bench.run("evaluate_reward", "d", spec("length", seed=1), read)
    assert [row["id"] for row in Rows(other)] != [row["id"] for row in Rows(whole)]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("constant", r"the reward is 0\.25 for every completion of 6 pairs: it is constant"),
        ("broken", r"no reward for prompt \w+: ZeroDivisionError: of theirs"),
        ("unknown", r"the reward of prompt \w+ is nan"),
    ],
)
def test_a_reward_that_says_nothing_is_refused(bench: Any, pairs: Artifact, name: str, message: str) -> None:
    with pytest.raises(RewardError, match=message):
        bench.run("evaluate_reward", "e", spec(name), {"conversations:0": pairs})


def test_conversations_without_labels_are_refused(bench: Any, tokenizer: Artifact) -> None:
    read = put_conversations(bench, "c", tokenizer, [dialogue("q", "one", "two")], split="validation")
    with pytest.raises(RewardError, match=r"no labelled pair to compare with \(1 without_label\). Fix"):
        bench.run("evaluate_reward", "e", spec("length"), {"conversations:0": read})
    with pytest.raises(RewardError, match=r"no labelled pair to compare with \(none\)"):
        bench.run("evaluate_reward", "f", spec("length", split="train"), {"conversations:0": read})


def test_pairs_that_are_too_long_for_the_model_are_dropped_and_counted(
    bench: Any, tokenizer: Artifact, tmp_path: Path
) -> None:
    folder = write_classifier(tmp_path / "reward", labels=1, template=None)
    pairs = [
        dialogue("short", "yes", "not at all", preference=True),
        dialogue("long", "yes " * 30, "no", preference=True),
    ]
    read = put_conversations(bench, "c", tokenizer, pairs, split="validation")
    stated = spec("", reward={"model": str(folder), "max_tokens": 30})
    artifact = bench.run("evaluate_reward", "e", stated, {"conversations:0": read}, launch={"threads": 1})
    assert (artifact.manifest.metrics["pairs"], artifact.manifest.metrics["too_long"]) == (1, 1)


def test_a_judge_is_measured_with_the_bias_of_its_order(bench: Any, pairs: Artifact, tmp_path: Path) -> None:
    folder = other_folder(tmp_path / "judge", "Qwen3ForCausalLM")
    attempt = attempt_at(bench, "model_folder", "judge0")
    for path in sorted(folder.iterdir()):
        attempt.put(path, path.name)
    attempt.commit(metrics={})
    (tmp_path / "c.txt").write_text("1. Be brief.")
    judge = {"from": "hf:theirs", "constitution": str(tmp_path / "c.txt"), "pairwise": {"best": 2}}
    stated = spec("", reward={"judge": judge})
    read = {"conversations:0": pairs, "judge": attempt.artifact}
    artifact = bench.run("evaluate_reward", "e", stated, read, launch={"threads": 1})
    metrics = artifact.manifest.metrics
    rows = [row for row in Rows(artifact) if "answers" in row]
    shares = []
    for row in rows:
        given = {tuple(one["about"]): one["probabilities"] for one in row["answers"]}
        assert set(given) == {(0,), (1,), (0, 1), (1, 0)}
        shares.append([given[order][0] / sum(given[order]) for order in ((0, 1), (1, 0))])
    assert metrics["order_bias"] == pytest.approx(sum(map(sum, shares)) / 12 - 0.5)
    right = [(first + 1 - second) / 2 > 0.5 for first, second in shares]
    assert metrics["accuracy/compared"] == metrics["accuracy"] == pytest.approx(sum(right) / 6)
    assert artifact.bytes("constitution.txt") == b"1. Be brief."
    assert {*metrics} - {"without_label", "equal_completions"} == {
        *EvaluateRewardPart.model_validate(stated).metrics()
    }
