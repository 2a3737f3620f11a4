from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from apertus_model.data.rows import Rows
from infra.store import Artifact
from specs.errors import StageError
from tests.apertus_model.preference_artifacts import put_rows

FACTS = {"tokenizer": "t", "vocab_size": 512, "bos_id": 1, "eos_id": 2, "pad_id": 10, "end_of_turn_id": 68}
PART = {"pairs": 1, "worst_quantile": 0.2, "max_tokens": 100}


def _run(bench: Any, prompts: list[dict[str, list[float]]], **changes: Any) -> Artifact:
    """A prompt is given by the rewards of its completions; a completion has one token more than the one
    before."""
    rows: dict[str, list[Any]] = {"prompts": [], "completions": [], "rewards": []}
    for index, rewards in enumerate(prompts):
        name, number = f"p{index}", 0
        texts: dict[str, list[Any]] = {"offline": [], "sampled": []}
        for origin in texts:
            for place, _ in enumerate(rewards[origin]):
                number += 1
                texts[origin].append(
                    {
                        "text": f"{name}{origin[0]}{place}",
                        "tokens": [300 + place] * number + [68],
                        "finished": True,
                    }
                )
        rows["prompts"].append(
            {
                "id": name,
                "text": f"prompt {index}",
                "tokens": [1, 60 + index],
                "completions": texts["offline"],
            }
        )
        rows["completions"].append({"id": name, "completions": texts["sampled"]})
        rows["rewards"].append({"id": name, **rewards})
    spec = {"reward": {"function": "grounded-answer"}}
    inputs = {kind: put_rows(bench, kind, kind, values, FACTS, spec) for kind, values in rows.items()}
    return bench.run("pairs", changes.pop("fingerprint", "pairs"), PART | changes, inputs)


def _arrays(artifact: Artifact) -> dict[str, np.ndarray]:
    names = ("tokens", "lengths", "prompt_lengths", "rewards")
    return {name: np.load(artifact.local(f"{name}.npy"), allow_pickle=False) for name in names}


def test_a_pair_is_stored_for_people_and_as_arrays(bench: Any) -> None:
    artifact = _run(bench, [{"offline": [9.0], "sampled": [3.0, 1.0, 2.0, 4.0]}])
    [row] = [json.loads(line) for line in artifact.bytes("pairs.jsonl").splitlines()]
    assert row == {
        "id": "p0",
        "prompt": "prompt 0",
        "chosen": {"text": "p0o0", "reward": 9.0, "quantile": 1.0, "origin": "offline"},
        "rejected": {"text": "p0s1", "reward": 1.0, "quantile": 0.25, "origin": "sampled"},
    }
    arrays = _arrays(artifact)
    assert arrays["tokens"].tolist() == [1, 60, 300, 68, 1, 60, 301, 301, 301, 68]
    assert arrays["lengths"].tolist() == [4, 6]
    assert arrays["prompt_lengths"].tolist() == [2, 2]
    assert arrays["rewards"].tolist() == [1.0, 0.25]
    assert [arrays[name].dtype for name in arrays] == [np.int32, np.int64, np.int64, np.float32]
    assert artifact.manifest.facts == FACTS | {"pairs": 1, "sequences": 2}
    assert artifact.manifest.metrics == {
        **{"pairs": 1, "prompts": 1, "without_pair": {}, "tokens": 10},
        **{
            "mean_quantile_chosen": 1.0,
            "mean_quantile_rejected": 0.25,
            "offline_chosen": 1.0,
            "offline_rejected": 0.0,
        },
        "quantile_histogram": [0, 0, 1, 0, 0, 1, 0, 1, 0, 2],
    }


def test_prompts_without_a_pair_are_counted_by_reason(bench: Any) -> None:
    good = {"offline": [], "sampled": [1.0, 2.0]}
    artifact = _run(
        bench, [{"offline": [1.0, 2.0], "sampled": [1.0]}, good, {"offline": [], "sampled": [1.0, 1.0]}, good]
    )
    metrics = artifact.manifest.metrics
    assert (metrics["pairs"], metrics["without_pair"]) == (
        2,
        {"few_reference_rewards": 1, "equal_rewards": 1},
    )
    assert [json.loads(line)["id"] for line in artifact.bytes("pairs.jsonl").splitlines()] == ["p1", "p3"]


def test_no_pair_at_all_is_an_error(bench: Any) -> None:
    with pytest.raises(StageError, match=r"none of the 2 prompts.*few_reference_rewards.*equal_rewards"):
        _run(bench, [{"offline": [1.0, 2.0], "sampled": [1.0]}, {"offline": [], "sampled": [1.0, 1.0]}])


@pytest.mark.parametrize(
    ("second", "problem"),
    [(1.0, "1, for each of the 2 prompts"), (0.5, "one value, from 0.5 to 1 by prompt, for each of the 2")],
)
def test_a_constant_reward_is_an_error_that_names_it(bench: Any, second: float, problem: str) -> None:
    constant = [{"offline": [value], "sampled": [value, value]} for value in (1.0, second)]
    message = (
        f"the reward grounded-answer gives all completions of a prompt {problem}.*Fix: use a reward that"
        " tells"
    )
    with pytest.raises(StageError, match=message):
        _run(bench, constant, fingerprint=f"pairs{second}")


def test_completions_that_are_too_long_are_not_taken_but_count_in_the_reference(bench: Any) -> None:
    # Prompt 2 tokens, completions of 2, 3, 4, 5: the best one, the last, does not fit into 6.
    artifact = _run(bench, [{"offline": [], "sampled": [1.0, 3.0, 2.0, 9.0]}], max_tokens=6)
    [row] = [json.loads(line) for line in artifact.bytes("pairs.jsonl").splitlines()]
    assert (row["chosen"]["text"], row["chosen"]["quantile"], row["rejected"]["text"]) == (
        "p0s1",
        0.75,
        "p0s0",
    )


def test_a_second_pair_follows_the_first_and_depends_on_the_seed_alone(bench: Any) -> None:
    prompts = [{"offline": [], "sampled": [float(reward) for reward in range(8)]}] * 6 + [
        {"offline": [], "sampled": [1.0, 2.0]}
    ]
    artifact = _run(bench, prompts, pairs=2)
    rows = [json.loads(line) for line in artifact.bytes("pairs.jsonl").splitlines()]
    assert [row["id"] for row in rows] == [f"p{index}" for index in range(6) for _ in range(2)] + ["p6"]
    assert all(row["chosen"]["quantile"] >= 0.5 > row["rejected"]["quantile"] for row in rows[1:12:2])
    assert _run(bench, prompts, pairs=2, fingerprint="again").bytes("tokens.npy") == artifact.bytes(
        "tokens.npy"
    )
    assert _run(bench, prompts, pairs=2, fingerprint="seed", seed=1).bytes("pairs.jsonl") != artifact.bytes(
        "pairs.jsonl"
    )


def test_answers_of_generators_are_offline_completions_with_their_model(bench: Any) -> None:
    """Their rewards stand between those of the conversations and of the reference, which alone are ranked."""
    answers = {"a": ["weak", "best"], "b": ["middle"]}
    prompt = {"id": "p", "text": "?", "tokens": [1, 60], "messages": [], "answer": None, "metadata": {}}
    prompts = put_rows(bench, "prompts", "p", [prompt | {"completions": [completed("own")]}], FACTS)
    sampled = [{"id": "p", "completions": [completed("s1"), completed("s2")]}]
    inputs = {"prompts": prompts, "completions": put_rows(bench, "completions", "c", sampled)}
    for number, (name, texts) in enumerate(answers.items()):
        row = {"id": "p", "completions": [completed(text) for text in texts], "persona": f"persona {name}"}
        if name == "b":
            del row["persona"]
        facts = {"model": f"hf:{name}"}
        inputs[f"generated:{number}"] = put_rows(bench, "completions", f"g{number}", [row], facts)
    reward = {"function": "tests.apertus_model.stages.test_pairs:by_text", "version": 1}
    rewards = bench.run("rewards", "r", {"reward": reward}, {**inputs, "tokenizer": prompts})
    assert list(Rows(rewards)) == [{"id": "p", "offline": [0.0, 1.0, 9.0, 5.0], "sampled": [4.0, 6.0]}]
    sides: dict[str, dict[str, Any]] = {}
    for seed in range(12):
        artifact = bench.run("pairs", f"q{seed}", PART | {"seed": seed}, {**inputs, "rewards": rewards})
        [row] = [json.loads(line) for line in artifact.bytes("pairs.jsonl").splitlines()]
        sides |= {row[side]["text"]: {"side": side, **row[side]} for side in ("chosen", "rejected")}
    best, middle = (
        {"text": "best", "reward": 9.0, "quantile": 1.0},
        {"text": "middle", "reward": 5.0, "quantile": 0.5},
    )
    assert sides.pop("best") == {
        "side": "chosen",
        **best,
        "origin": "offline",
        "model": "hf:a",
        "persona": "persona a",
    }
    assert sides.pop("middle") == {"side": "rejected", **middle, "origin": "offline", "model": "hf:b"}
    assert {text: one["side"] for text, one in sides.items()} == {"s2": "chosen", "s1": "rejected"}
    artifact = bench.run("pairs", "further", PART | {"pairs": 2}, {**inputs, "rewards": rewards})
    further = json.loads(artifact.bytes("pairs.jsonl").splitlines()[1])
    assert further["rejected"]["quantile"] < 0.5 <= further["chosen"]["quantile"]


REWARDS = {"own": 0, "weak": 1, "best": 9, "middle": 5, "s1": 4, "s2": 6}


def by_text(items: list[Any]) -> list[float]:
    return [REWARDS[item.completion] for item in items]


def completed(text: str) -> dict[str, Any]:
    return {"text": text, "tokens": [300 + REWARDS[text], 68], "finished": True}
