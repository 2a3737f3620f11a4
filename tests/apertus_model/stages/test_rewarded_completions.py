"""Completions that bring their rewards: as tokens with quantiles, and trained on without pairs."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from apertus_model.data.preferences.samples import PreferenceSamples, PreferenceSets
from apertus_model.stages.prompts import prompt_id
from infra.store import Artifact, Attempt
from specs.errors import StageError
from specs.stages.preference_data import LogProbabilitiesPart
from tests.apertus_model.preference_artifacts import dialogue, encoder_of, put_conversations
from tests.apertus_model.stages.training import SPEC, Stages, segment

PART = {"reward": "reward", "reference_rewards": "reference_rewards", "max_tokens": 250}


def rewarded(
    bench: Any, tokenizer: Artifact, *rows: tuple[list[str], dict[str, Any]], **part: Any
) -> Artifact:
    """Each row: answers, and further columns."""
    talks = [dialogue(f"Q{n}?", *answers, metadata=more) for n, (answers, more) in enumerate(rows)]
    conversations = put_conversations(bench, "c", tokenizer, talks)
    inputs = {"conversations:0": conversations, "tokenizer": tokenizer}
    return bench.run("rewarded_completions", "r", PART | part, inputs)


def test_a_completion_has_its_quantile_among_the_reference_rewards(bench: Any, tokenizer: Artifact) -> None:
    found = rewarded(
        bench,
        tokenizer,
        (["Yes."], {"reward": 2, "reference_rewards": [1.0, 2.0, 3.0, 4.0]}),
        (["No.", "Maybe."], {"reward": [9.5, -1], "reference_rewards": [0.0, 1.0]}),
        completions_per_unit=1,
    )
    encoder = encoder_of(tokenizer)
    lines = [json.loads(line) for line in found.bytes("completions.jsonl").splitlines()]
    assert [(line["text"], line["reward"], line["quantile"]) for line in lines] == [
        ("Yes.", 2, 0.5),
        ("No.", 9.5, 1.0),
        ("Maybe.", -1, 0.0),
    ]
    prompts = [encoder.prompt([{"role": "user", "content": f"Q{n}?"}]) for n in (0, 1, 1)]
    assert [line["id"] for line in lines] == [prompt_id(prompt) for prompt in prompts]
    arrays = {
        name: np.load(found.local(f"{name}.npy"))
        for name in ("tokens", "lengths", "prompt_lengths", "rewards")
    }
    whole = [
        [*prompt.tolist(), *encoder.completion(line["text"]).tolist()]
        for prompt, line in zip(prompts, lines, strict=True)
    ]
    assert arrays["tokens"].tolist() == [token for one in whole for token in one]
    assert arrays["lengths"].tolist() == [len(one) for one in whole]
    assert arrays["prompt_lengths"].tolist() == [prompt.size for prompt in prompts]
    assert arrays["rewards"].tolist() == [0.5, 1.0, 0.0]
    assert found.manifest.facts["sequences"] == 3
    assert found.manifest.metrics["quantile_histogram"] == [1, 0, 0, 0, 0, 1, 0, 0, 0, 1]


GOOD = {"reward": 1, "reference_rewards": [0, 1]}


def test_what_is_left_out_is_counted_under_its_reason(bench: Any, tokenizer: Artifact) -> None:
    rows = [
        (["a"], GOOD),
        (["a"], {"reference_rewards": [0, 1]}),
        (["a"], GOOD | {"reward": math.nan}),
        (["a"], GOOD | {"reward": "1"}),
        (["a"], GOOD | {"reward": True}),
        (["a", "b"], GOOD | {"reward": [1]}),
        (["a"], {"reward": 1}),
        (["a"], {"reward": 1, "reference_rewards": [1]}),
        (["a"], {"reward": 1, "reference_rewards": [1, None]}),
        (["a b " * 200], GOOD),
    ]
    found = rewarded(bench, tokenizer, *rows)
    assert found.manifest.metrics["completions"] == 1
    assert found.manifest.metrics["dropped"] == {
        **{"without_reward": 1, "bad_reward": 5, "without_reference_rewards": 1},
        **{"few_reference_rewards": 1, "bad_reference_rewards": 1, "too_long": 1},
    }


def test_without_reference_rewards_there_is_no_quantile_and_the_error_says_so(
    bench: Any, tokenizer: Artifact
) -> None:
    with pytest.raises(StageError) as caught:
        rewarded(bench, tokenizer, (["a"], {"reward": 1}), (["b"], {"reward": 1}))
    assert "no completion is left: 2 without_reference_rewards" in str(caught.value)
    assert "'reference_rewards', of 2 or more completions of the model" in str(caught.value)


def put_completions(attempt: Attempt, count: int, seed: int) -> None:
    random = np.random.default_rng(seed)
    lengths = random.integers(4, 9, count)
    arrays = {
        "tokens": random.integers(20, 120, lengths.sum()).astype(np.int32),
        "lengths": lengths.astype(np.int64),
        "prompt_lengths": np.full(count, 2, np.int64),
        "rewards": random.random(count).astype(np.float32),
    }
    for name, array in arrays.items():
        np.save(attempt.workdir / f"{name}.npy", array)
        attempt.put(attempt.workdir / f"{name}.npy", f"{name}.npy")
    attempt.commit(metrics={}, facts={"pad_id": 3, "sequences": count})


def test_qrpo_trains_completions_without_pairs(tmp_path: Path) -> None:
    """The first loss is the mean over the batch of (q - beta ln Z(beta))^2, by the formula, since the
    log-ratios are zero; and no metric is one of pairs."""
    stages = Stages(tmp_path)
    stages.train("trained", SPEC)
    put_completions(stages.attempt("rewarded_completions", "r"), 31, 5)
    inputs = {
        "pairs": stages.ref("rewarded_completions/r"),
        "checkpoint": stages.ref("pretrain/trained", 6),
    }
    part = LogProbabilitiesPart(
        model=SPEC.model, sequence_length=20, precision={"param": "float32"}, batch_size=2
    )
    stages.run("log_probabilities", "l", part, inputs=inputs)
    inputs = {
        "pairs": inputs["pairs"],
        "log_probabilities": stages.ref("log_probabilities/l"),
        "parent": inputs["checkpoint"],
    }
    spec = segment("qrpo", seed=None, micro_batch_size=2, sequence_length=20)
    trained = stages.run("qrpo", "q", spec, inputs=inputs)
    rows = [row for row in trained.history() if "loss" in row]
    assert rows[0]["log_ratio"] == 0.0 != rows[-1]["log_ratio"]
    assert not {"log_ratio_chosen", "log_ratio_rejected", "accuracy"} & rows[0].keys()

    stored = PreferenceSamples.open(
        Artifact(stages.store, "rewarded_completions/r"), None, sequence_length=20, pad_id=3, sides=1
    )
    samples = PreferenceSets([stored], [1], seed=spec.data_seed)
    losses = []
    for index in range(spec.global_batch_size):
        sample = samples[index]
        assert not sample.present[1::2].any()
        for slot in np.flatnonzero(sample.present):
            beta = min(spec.loss.beta / (sample.segments == slot).sum(), spec.loss.beta_max)
            log_partition = math.log(beta * (math.exp(1 / beta) - 1))
            losses.append((float(sample.rewards[slot]) - beta * log_partition) ** 2)
    assert len(losses) > spec.global_batch_size
    assert rows[0]["loss"] == pytest.approx(np.mean(losses), rel=1e-5)
