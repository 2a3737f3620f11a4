"""Prefixes of probes are continued as the model continues them, in units that change nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from apertus_model.data.rows import Row, Rows
from infra.store import Artifact
from tests.apertus_model.preference_artifacts import attempt_at, put_model

PROBES = [np.random.default_rng(index).integers(20, 400, 20).tolist() for index in range(5)]
SHORT = [1, 2, 3]
GREEDY = {"temperature": 0}


@pytest.fixture
def inputs(bench: Any, tokenizer: Artifact) -> dict[str, Artifact]:
    attempt = attempt_at(bench, "corpus", "probed")
    probes = [{"bucket": 0, "token_ids": tokens} for tokens in [*PROBES[:2], SHORT, *PROBES[2:]]]
    attempt.write_json("probes.json", {"length": 20, "probes": probes})
    attempt.commit(metrics={}, facts={})
    return {"model": put_model(bench, tokenizer, favourite=None), "probes": attempt.artifact}


def continuations(
    bench: Any, inputs: dict[str, Artifact], fingerprint: str, *, units: int = 1, **spec: Any
) -> list[Row]:
    sampling = {"n": 1, "max_new_tokens": 5, "batch_size": 2} | spec.pop("sampling", {})
    stated = {"prefixes": [4, 9], "offsets": [0, 3], "batches_per_unit": units, "sampling": sampling} | spec
    return list(Rows(bench.run("continuations", fingerprint, stated, inputs)))


def test_greedy_continuations_are_the_most_probable_tokens_and_nothing_ends_them(
    bench: Any, inputs: dict[str, Artifact]
) -> None:
    from transformers import AutoModelForCausalLM

    folder = Path(inputs["model"].local("config.json")).parent
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    rows = continuations(bench, inputs, "greedy", sampling=GREEDY)
    settings = [(prefix, offset) for prefix in (4, 9) for offset in (0, 3)]
    numbers = [0, 1, 3, 4, 5]  # without the short one
    assert [(row["prefix"], row["offset"], row["probe"]) for row in rows] == [
        (*setting, number) for setting in settings for number in numbers
    ]
    for row in rows:
        probe = PROBES[numbers.index(row["probe"])]
        tokens = probe[row["offset"] : row["offset"] + row["prefix"]]
        for _ in range(5):  # without a cache
            with torch.no_grad():
                tokens = [*tokens, int(model(torch.tensor([tokens])).logits[0, -1].argmax())]
        assert row["tokens"] == tokens[-5:]


def test_drawn_continuations_change_with_the_seed_and_with_nothing_else(
    bench: Any, inputs: dict[str, Artifact]
) -> None:
    drawn = {"top_p": 0.9, "temperature": 1.0}
    whole = continuations(bench, inputs, "drawn", sampling=drawn)
    assert continuations(bench, inputs, "in-one-unit", units=9, sampling=drawn) == whole
    alone = continuations(bench, inputs, "alone", prefixes=[9], offsets=[3], sampling=drawn)
    assert alone == [row for row in whole if (row["prefix"], row["offset"]) == (9, 3)]
    assert continuations(bench, inputs, "seeded", sampling=drawn | {"seed": 29}) != whole
    first, other = (
        [row["tokens"] for row in whole if (row["prefix"], row["offset"]) == at] for at in [(4, 0), (4, 3)]
    )
    assert first != other
