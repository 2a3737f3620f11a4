from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from apertus_model.data.preferences.reward_samples import RewardSamples
from infra.store import Artifact
from specs.errors import StageError
from tests.apertus_model.preference_artifacts import dialogue, encoder_of, put_conversations


def labelled(question: str, chosen: str, rejected: str, **more: Any) -> Any:
    return dialogue(question, chosen, rejected, preference=True, **more)


def run(bench: Any, tokenizer: Artifact, conversations: list[Any], **part: Any) -> Artifact:
    inputs = {
        "conversations:0": put_conversations(bench, "talks", tokenizer, conversations),
        "conversations:1": put_conversations(
            bench, "held", tokenizer, [labelled("Held?", "Out.", "In.")], "validation"
        ),
        "tokenizer": tokenizer,
    }
    made: Artifact = bench.run("labelled_pairs", "pairs", {"max_tokens": 200, **part}, inputs)
    return made


def test_pairs_are_the_tokens_that_the_chat_template_gives(bench: Any, tokenizer: Artifact) -> None:
    first = labelled("Why?", "Because of it.", "No.", metadata={"strength": 2})
    made = run(bench, tokenizer, [first, labelled("Who?", "She.", "He.")], margin="strength")
    encoder = encoder_of(tokenizer)
    tokens = np.load(made.local("train-tokens.npy"), allow_pickle=False)
    lengths = np.load(made.local("train-lengths.npy"), allow_pickle=False)
    sequences = np.split(tokens, np.cumsum(lengths)[:-1])
    for sequence, answer in zip(sequences[:2], ("Because of it.", "No."), strict=True):
        whole = [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": answer}]
        assert sequence.tolist() == encoder.encode(whole).tokens.tolist()
        assert sequence[-1] == encoder.end_of_turn_id
    assert np.load(made.local("train-margins.npy"), allow_pickle=False).tolist() == [2.0, 0.0]
    held = RewardSamples.open(made, "validation", sequence_length=200)
    assert (held.sequences, held.sources.tolist()) == (2, [1])
    assert made.manifest.metrics == {
        "train": {"pairs": 2, "without_margin": 1},
        "validation": {"pairs": 1, "without_margin": 1},
    }


def test_what_is_no_pair_is_counted_under_its_reason(bench: Any, tokenizer: Artifact) -> None:
    talks = [
        labelled("Why?", "Because.", "No.", metadata={"strength": 1}),
        dialogue("Two?", "First.", "Second."),
        labelled("Same?", "Yes.", "Yes."),
        labelled("Long?", "word " * 200, "No."),
        *(labelled(f"Bad {value}?", "A.", "B.", metadata={"strength": value}) for value in (-1, "two", True)),
    ]
    counts = run(bench, tokenizer, talks, margin="strength").manifest.metrics["train"]
    assert counts == {
        "pairs": 1,
        "without_margin": 0,
        "without_label": 1,
        "equal_completions": 1,
        "too_long": 1,
        "bad_margin": 3,
    }


def test_no_pair_that_fits_is_an_error_with_the_counts(bench: Any, tokenizer: Artifact) -> None:
    with pytest.raises(StageError, match=r"train: 2 too_long; .* a larger sequence_length than 10"):
        run(bench, tokenizer, [labelled("A?", "B.", "C."), labelled("D?", "E.", "F.")], max_tokens=10)
