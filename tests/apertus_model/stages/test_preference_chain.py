"""From conversations to packed pairs, part after part."""

from __future__ import annotations

import json
from typing import Any

from apertus_model.data.preferences.samples import PreferenceSamples
from apertus_model.data.rows import Rows
from infra.store import Artifact
from tests.apertus_model.preference_artifacts import dialogue, encoder_of, put_conversations, put_model


def test_pairs_are_made_of_conversations_and_of_what_the_model_says(bench: Any, tokenizer: Artifact) -> None:
    answers = ["Return the first item.", "Close the file and return nothing.", "Write a line of text."]
    dialogues = [
        dialogue(f"What does f{i} do?", answers[i % 3], metadata={"function": f"m.f{i}"}) for i in range(12)
    ]
    conversations = put_conversations(bench, "c", tokenizer, dialogues)
    spec = {"split": "train", "max_tokens": 250, "max_new_tokens": 12, "sampled": 8, "prompts_per_unit": 5}
    prompts = bench.run("prompts", "p", spec, {"conversations:0": conversations, "tokenizer": tokenizer})
    sampling = {"n": 8, "max_new_tokens": 12, "batch_size": 4}
    model = put_model(bench, tokenizer)
    read = {"prompts": prompts, "model": model}
    completions = bench.run("completions", "s", {"sampling": sampling, "prompts_per_unit": 4}, read)
    read = {"prompts": prompts, "completions": completions}
    reward = {"function": "grounded-answer", "model": None}
    rewards = bench.run("rewards", "r", {"reward": reward}, read | {"tokenizer": tokenizer})
    pairs = bench.run(
        "pairs", "q", {"pairs": 2, "worst_quantile": 0.2, "max_tokens": 250}, read | {"rewards": rewards}
    )

    assert all(row["offline"] == [1.0] and max(row["sampled"]) < 1 for row in Rows(rewards))
    assert rewards.manifest.metrics["ties"] < 0.02
    lines = [json.loads(line) for line in pairs.bytes("pairs.jsonl").splitlines()]
    assert len(lines) == 24
    # the conversation's answer and the best sampled one have quantile 1, and either may be chosen
    assert all(row["chosen"]["quantile"] == 1 and row["rejected"]["quantile"] <= 0.2 for row in lines[::2])
    assert {row["chosen"]["origin"] for row in lines[::2]} == {"offline", "sampled"}
    assert all(row["rejected"]["origin"] == "sampled" for row in lines)
    assert all(row["chosen"]["reward"] > row["rejected"]["reward"] for row in lines)

    facts = pairs.manifest.facts
    assert facts["pad_id"] == 10
    samples = PreferenceSamples.open(pairs, None, sequence_length=600, pad_id=facts["pad_id"])
    encoder = encoder_of(tokenizer)
    for row in range(samples.rows):
        sample = samples.row(row)
        for segment, sequence in enumerate(samples.sequence_ids(row)):
            side = lines[sequence // 2]["rejected" if sequence % 2 else "chosen"]
            labels = sample.labels[sample.segments == segment]
            assert encoder.decode(labels) == side["text"]
            if side["origin"] == "offline":
                assert labels.tolist() == encoder.completion(side["text"]).tolist()
