"""Continuations are compared with what training repeated."""

from __future__ import annotations

import itertools
from difflib import SequenceMatcher
from typing import Any

import numpy as np
import pytest

from apertus_model.data.corpora.planted import StoredProbe
from apertus_model.evaluation.memorisation import compare, memorisation, type_token_ratio
from specs.stages.memorisation import Memorisation

PROBES = [
    {"bucket": bucket, "token_ids": np.random.default_rng(index).integers(0, 128, 40).tolist()}
    for index, bucket in enumerate([0, 0, 8, 8, 8])
]
REPEATED = {"bucket": 16, "token_ids": [5] * 40}
SHORT = {"bucket": 8, "token_ids": [1, 2, 3]}


def longest_common_subsequence(first: list[int], second: list[int]) -> int:
    """By trying the subsequences of the first, the longest ones first."""
    for length in range(len(first), 0, -1):
        for chosen in itertools.combinations(first, length):
            rest = iter(second)
            if all(token in rest for token in chosen):
                return length
    return 0


def test_continuations_are_compared_by_equality_subsequence_run_and_distinct_tokens() -> None:
    truths = np.array([[1, 2, 3, 4]] * 4)
    answers = np.array([[1, 2, 3, 4], [1, 2, 9, 4], [5, 5, 5, 5], [4, 1, 2, 3]])
    found = compare(truths, answers)
    assert {measure: values.tolist() for measure, values in found.items()} == {
        "exact": [1, 0, 0, 0],
        "rouge_l": [1, 0.75, 0, 0.75],
        "common_substring": [1, 0.5, 0, 0.75],
        "type_token_ratio": [1, 1, 0.25, 1],
    }


def test_scores_equal_those_of_definitions_that_try_everything() -> None:
    random = np.random.default_rng(4)
    truths, answers = random.integers(0, 4, (2, 60, 9))
    found = compare(truths, answers)
    for row, (truth, answer) in enumerate(zip(truths.tolist(), answers.tolist(), strict=True)):
        run = SequenceMatcher(None, truth, answer, autojunk=False).find_longest_match().size
        assert found["common_substring"][row] == run / 9
        assert found["rouge_l"][row] == longest_common_subsequence(truth, answer) / 9
        assert found["type_token_ratio"][row] == len(set(answer)) / 9
    assert type_token_ratio(truths[:0]).shape == (0,)


def measured(
    probes: list[dict[str, Any]], answers: dict[str, dict[int, list[int]]], **spec: Any
) -> dict[str, float]:
    """With the same answers by decoding and probe for each prefix and offset."""
    settings = Memorisation.model_validate({"probes": "corpus", "suffix": 8, **spec})
    rows = {
        decoding: [
            {"probe": probe, "prefix": prefix, "offset": offset, "tokens": tokens}
            for prefix in settings.prefixes
            for offset in settings.offsets
            for probe, tokens in found.items()
        ]
        for decoding, found in answers.items()
    }
    return memorisation([StoredProbe.model_validate(probe) for probe in probes], rows, settings)


def test_metrics_are_means_over_the_probes_of_a_bucket() -> None:
    """Probe k of bucket 8 is continued as it goes on but for its last k - 2 tokens."""
    truths = [probe["token_ids"][15:23] for probe in PROBES]
    greedy = {
        index: truth[: 8 - max(0, index - 2)] + [128] * max(0, index - 2)
        for index, truth in enumerate(truths)
    }
    metrics = measured(PROBES, {"greedy": greedy}, prefixes=[12], offsets=[3])
    at = "memorisation/greedy/prefix-12/offset-3"
    assert metrics[f"{at}/exact/0"] == 1
    assert metrics[f"{at}/exact/8"] == 1 / 3
    assert metrics[f"{at}/rouge_l/8"] == pytest.approx((8 + 7 + 6) / 24)
    assert metrics[f"{at}/common_substring/8"] == pytest.approx((8 + 7 + 6) / 24)
    assert metrics[f"{at}/type_token_ratio/8"] == pytest.approx(
        np.mean([len(set(greedy[index])) / 8 for index in (2, 3, 4)])
    )
    assert metrics[f"{at}/exact/8/low"] <= 1 / 3 <= metrics[f"{at}/exact/8/high"]


def test_short_and_degenerate_probes_are_left_out_and_every_name_is_planned() -> None:
    spec: dict[str, Any] = {"prefixes": [4, 6], "offsets": [0, 1], "nucleus": {}, "min_type_token_ratio": 0.4}
    probes = [*PROBES, REPEATED, SHORT]
    answers = {probe: [7] * 8 for probe in range(6)}  # the short one is not continued
    metrics = measured(probes, {"greedy": answers, "nucleus": answers}, **spec)
    counts = {
        bucket: metrics[f"memorisation/truth/prefix-4/offset-0/sequences/{bucket}"] for bucket in (0, 8, 16)
    }
    assert counts == {0: 2, 8: 3, 16: 0}
    planned = Memorisation.model_validate({"probes": "corpus", "suffix": 8, **spec}).metrics([0, 8, 16])
    missing = set(planned) - set(metrics)
    assert set(metrics) <= set(planned)
    assert missing - {"memorisation/passes"} == {
        name for name in planned if "/16" in name and "sequences" not in name
    }
