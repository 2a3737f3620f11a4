"""Measures of a classifier beside their definitions, counted by hand or over all pairs."""

from __future__ import annotations

import math
from random import Random

import numpy as np
import pytest

from apertus_model.classifiers.measures import auc, average_precision, calibration, measure, thresholds


def test_measures_of_six_documents_are_those_counted_by_hand() -> None:
    first = np.array([0.9, 0.8, 0.6, 0.4, 0.3, 0.2])
    labels = np.array([0, 0, 1, 0, 1, 1])
    found = measure(np.stack([first, 1 - first], 1), labels, ["a", "b"])
    assert found["accuracy"] == pytest.approx(4 / 6)  # the third and the fourth are wrong
    assert found["precision/a"] == pytest.approx(2 / 3) and found["recall/a"] == pytest.approx(2 / 3)
    assert (found["documents/a"], found["documents/b"]) == (3, 3)
    true = [0.9, 0.8, 0.4, 0.4, 0.7, 0.8]
    assert found["loss"] == pytest.approx(-sum(map(math.log, true)) / 6)
    assert found["auc/a"] == found["auc/b"] == pytest.approx(8 / 9)  # one pair of nine is the wrong way round
    assert found["average_precision/a"] == pytest.approx((1 / 1 + 2 / 2 + 3 / 4) / 3)


def test_calibration_error_is_the_weighted_gap_of_the_bins() -> None:
    confidence = np.array([0.55, 0.58, 0.7, 0.95, 0.98, 1.0])
    right = np.array([True, False, True, True, True, False])
    error, bins = calibration(confidence, right, bins=5)
    # (0.4, 0.6]: 0.565 and 1/2; (0.6, 0.8]: 0.7 and 1; (0.8, 1]: 2.93/3 and 2/3
    assert [row["documents"] for row in bins] == [2, 1, 3]
    assert [(row["low"], row["high"]) for row in bins] == [(0.4, 0.6), (0.6, 0.8), (0.8, 1.0)]
    assert error == pytest.approx((2 * 0.065 + 1 * 0.3 + 3 * (2.93 / 3 - 2 / 3)) / 6)


def test_a_classifier_that_is_as_often_right_as_it_says_is_calibrated() -> None:
    error, _ = calibration(np.full(10, 0.7), np.arange(10) < 7)
    assert error == pytest.approx(0, abs=1e-12)


def test_auc_is_the_share_of_pairs_in_the_right_order() -> None:
    random = Random(0)
    scores = np.array([random.randrange(20) / 20 for _ in range(200)])  # with many ties
    positive = np.array([random.random() < score for score in scores])
    pairs = [(p > n) + (p == n) / 2 for p in scores[positive] for n in scores[~positive]]
    assert auc(scores, positive) == pytest.approx(sum(pairs) / len(pairs))


def test_average_precision_is_the_sum_over_thresholds() -> None:
    random = Random(1)
    scores = np.array([random.randrange(15) / 15 for _ in range(150)])
    positive = np.array([random.random() < score for score in scores])
    expected, before = 0.0, 0.0
    for threshold in sorted(set(scores), reverse=True):
        chosen = scores >= threshold
        recall = (chosen & positive).sum() / positive.sum()
        expected += (recall - before) * (chosen & positive).sum() / chosen.sum()
        before = recall
    assert average_precision(scores, positive) == pytest.approx(expected)


def test_thresholds_are_numpys_percentiles_of_all_and_of_each_language() -> None:
    scores = np.random.default_rng(0).random(300).astype(np.float32)
    languages = np.array(["deu_Latn", "fra_Latn", ""] * 100)
    found = thresholds(scores, languages, [90, 97.5])
    assert list(found) == ["", "deu_Latn", "fra_Latn"]
    assert found[""] == {
        "p90": np.percentile(scores.astype(float), 90),
        "p97.5": np.percentile(scores.astype(float), 97.5),
    }
    own = scores[languages == "fra_Latn"]
    assert found["fra_Latn"]["p90"] == np.percentile(own.astype(float), 90)
    assert (own > found["fra_Latn"]["p90"]).sum() == 10
