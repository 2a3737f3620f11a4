from __future__ import annotations

from typing import Any

import pytest

from apertus_model.data.rows import Rows
from infra.store import Artifact, Attempt
from specs.errors import StageError
from tests.apertus_model.preference_artifacts import dialogue, encoder_of, put_conversations

PART = {"split": "train", "max_tokens": 250, "max_new_tokens": 8, "sampled": 4}


def _questions(count: int) -> list[Any]:
    return [
        dialogue(f"question {i}", f"answer {i}", f"other {i}", metadata={"number": i}) for i in range(count)
    ]


def _prompts(
    bench: Any, tokenizer: Artifact, conversations: list[Any], fingerprint: str = "p", **changes: Any
) -> Artifact:
    sources = {
        "conversations:0": put_conversations(
            bench, f"of-{fingerprint}", tokenizer, conversations, changes.get("split", "train")
        )
    }
    return bench.run("prompts", fingerprint, PART | changes, sources | {"tokenizer": tokenizer})


def test_a_prompt_is_the_conversation_before_the_last_answer(bench: Any, tokenizer: Artifact) -> None:
    messages = [
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "two"},
        {"role": "user", "content": "three <|assistant_end|>"},
    ]
    own = dialogue("x", "four", "five", id="c", metadata={"k": 1})
    conversation = type(own)("c", [*messages, own.messages[-1]], None, own.completions, "g", own.metadata)
    artifact = _prompts(bench, tokenizer, [conversation], max_tokens=250)
    [row] = Rows(artifact)
    encoder = encoder_of(tokenizer)
    assert row["tokens"] == encoder.prompt(messages).tolist()
    assert (row["messages"], row["conversations"], row["group"], row["metadata"]) == (
        messages,
        ["c"],
        "g",
        {"k": 1},
    )
    assert row["completions"] == [
        {"text": text, "tokens": encoder.completion(text).tolist()} for text in ("four", "five")
    ]
    assert row["answer"] == "four"
    assert row["text"].endswith("<|assistant_start|>")
    facts = artifact.manifest.facts
    assert (facts["end_of_turn_id"], facts["pad_id"], facts["rows"], facts["shards"]) == (
        68,
        10,
        1,
        ["prompts-00000"],
    )


def test_without_offline_completions_the_answer_is_still_known(bench: Any, tokenizer: Artifact) -> None:
    [row] = Rows(_prompts(bench, tokenizer, _questions(1), offline=False))
    assert (row["completions"], row["answer"]) == ([], "answer 0")


def test_every_drop_is_counted_under_its_reason(bench: Any, tokenizer: Artifact) -> None:
    encoder = encoder_of(tokenizer)
    short = dialogue("short", "a", "bb " * 100)
    long_prompt = dialogue("long " * 40, "a", "b")
    single = dialogue("single", "a")
    prompt = encoder.prompt(short.messages[:1]).size
    artifact = _prompts(
        bench,
        tokenizer,
        [short, long_prompt, single],
        max_tokens=prompt + 20,
        max_new_tokens=8,
        sampled=0,
        min_branches=1,
    )
    assert artifact.manifest.metrics == {
        "conversations": 3,
        "conversations_too_long": 1,
        "conversations_merged": 0,
        "completions_too_long": 1,
        "prompts": 2,
        "completions": 2,
        "prompt_tokens": sum(len(row["tokens"]) for row in Rows(artifact)),
    }
    few = _prompts(bench, tokenizer, [dialogue("q", "a", "b"), single], "few", sampled=0, min_branches=2)
    assert [row["conversations"] for row in Rows(few)] == [["q"]]
    assert few.manifest.metrics["prompts_with_few_completions"] == 1


def test_the_room_for_a_new_completion_is_exact(bench: Any, tokenizer: Artifact) -> None:
    conversation = dialogue("question", "a", "b")
    size = encoder_of(tokenizer).prompt(conversation.messages[:1]).size
    assert len(Rows(_prompts(bench, tokenizer, [conversation], "fits", max_tokens=size + 8))) == 1
    with pytest.raises(StageError, match=f"1 conversations_too_long.*max_tokens {size + 7}"):
        _prompts(bench, tokenizer, [conversation], "not", max_tokens=size + 7)


def test_the_same_prompt_of_several_conversations_appears_once_with_all_completions(
    bench: Any, tokenizer: Artifact
) -> None:
    twice = [dialogue("q", "a", "b", id="1"), dialogue("other", "z", id="2"), dialogue("q", "b", "c", id="3")]
    sources = {
        "conversations:0": put_conversations(bench, "one", tokenizer, twice[:2]),
        "conversations:1": put_conversations(bench, "two", tokenizer, twice[2:]),
        "tokenizer": tokenizer,
    }
    artifact = bench.run("prompts", "p", PART, sources)
    rows = {
        tuple(row["conversations"]): [one["text"] for one in row["completions"]] for row in Rows(artifact)
    }
    assert rows == {("1", "3"): ["a", "b", "c"], ("2",): ["z"]}
    metrics = artifact.manifest.metrics
    assert (metrics["conversations_merged"], metrics["completions_repeated"]) == (1, 1)


def test_the_order_is_that_of_the_seed_and_a_limit_takes_its_beginning(
    bench: Any, tokenizer: Artifact
) -> None:
    questions = _questions(20)
    everything = [row["conversations"][0] for row in Rows(_prompts(bench, tokenizer, questions, "all"))]
    assert sorted(everything) == sorted(one.id for one in questions)
    assert everything != [one.id for one in questions]
    limited = _prompts(bench, tokenizer, questions[::-1], "limited", limit=5)
    assert [row["conversations"][0] for row in Rows(limited)] == everything[:5]
    assert limited.manifest.metrics["prompts_beyond_limit"] == 15
    fewer = [row["conversations"][0] for row in Rows(_prompts(bench, tokenizer, questions[:10], "fewer"))]
    assert fewer == [name for name in everything if name in set(fewer)]
    assert [
        row["conversations"][0] for row in Rows(_prompts(bench, tokenizer, questions, "seed", seed=1))
    ] != everything


def test_the_held_out_split_can_be_asked_for(bench: Any, tokenizer: Artifact) -> None:
    assert len(Rows(_prompts(bench, tokenizer, _questions(3), split="validation"))) == 3


def test_units_do_not_change_the_files(bench: Any, tokenizer: Artifact) -> None:
    inputs = {
        "conversations:0": put_conversations(bench, "c", tokenizer, _questions(9)),
        "tokenizer": tokenizer,
    }
    first = bench.run("prompts", "one", PART | {"prompts_per_unit": 1}, inputs)
    second = bench.run("prompts", "many", PART | {"prompts_per_unit": 4}, inputs)
    assert first.bytes("prompts-00000.jsonl") == second.bytes("prompts-00000.jsonl")


def test_a_killed_part_resumes_with_its_missing_units(bench: Any, tokenizer: Artifact) -> None:
    class Killed(Attempt):
        def commit_unit(self, key: str, **more: Any) -> None:
            if key.endswith("-00000006-00000009"):
                raise KeyboardInterrupt
            super().commit_unit(key, **more)

    spec = PART | {"prompts_per_unit": 3}
    inputs = {
        "conversations:0": put_conversations(bench, "c", tokenizer, _questions(9)),
        "tokenizer": tokenizer,
    }
    with pytest.raises(KeyboardInterrupt):
        bench.run("prompts", "p", spec, inputs, attempt_class=Killed)
    artifact = bench.run("prompts", "p", spec, inputs, attempt="second")
    folder = f"{artifact.path}/units"
    attempts = [bench.store.read_json(f"{folder}/{name}")["attempt"] for name in bench.store.names(folder)]
    assert attempts == ["first", "first", "second"]
    assert len(Rows(artifact)) == 9
