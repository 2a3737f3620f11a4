"""The quality of a classifier on held-out documents, and the thresholds of its scores. Pure functions of
arrays, in float64."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specs.scoring import percentile_name
from specs.stages.classifier import CALIBRATION_BINS

ALL = ""
"""Stands for all languages."""
Thresholds = dict[str, dict[str, float]]
"""Thresholds by language and name of the percentile."""


def measure(
    probabilities: NDArray[np.floating[Any]], labels: NDArray[np.int64], names: Sequence[str]
) -> dict[str, Any]:
    """The metrics of probabilities (documents, labels) against the true labels; see `ClassifierStage`."""
    values = probabilities.astype(np.float64)
    predicted = values.argmax(1)
    true = values[np.arange(len(labels)), labels]
    error, bins = calibration(values.max(1), predicted == labels)
    metrics: dict[str, Any] = {
        "accuracy": float((predicted == labels).mean()),
        "loss": float(-np.log(np.maximum(true, np.finfo(np.float32).tiny)).mean()),
        "calibration_error": error,
    }
    for index, name in enumerate(names):
        own, assigned = labels == index, predicted == index
        metrics |= {
            f"documents/{name}": int(own.sum()),
            f"precision/{name}": float((own & assigned).sum() / max(1, assigned.sum())),
            f"recall/{name}": float((own & assigned).sum() / own.sum()),
            f"auc/{name}": auc(values[:, index], own),
            f"average_precision/{name}": average_precision(values[:, index], own),
        }
    return metrics | {"reliability": bins}


def calibration(
    confidence: NDArray[np.float64], right: NDArray[np.bool_], bins: int = CALIBRATION_BINS
) -> tuple[float, list[dict[str, float]]]:
    """The expected calibration error (Guo et al. 2017): over bins (low, high] of equal width, the mean of
    |accuracy - mean confidence|, weighted by documents; and the bins that have documents."""
    places = np.clip(np.ceil(confidence * bins).astype(int) - 1, 0, bins - 1)
    rows = [
        {
            "low": place / bins,
            "high": (place + 1) / bins,
            "documents": int((places == place).sum()),
            "confidence": float(confidence[places == place].mean()),
            "accuracy": float(right[places == place].mean()),
        }
        for place in np.unique(places)
    ]
    gaps = sum(row["documents"] * abs(row["accuracy"] - row["confidence"]) for row in rows)
    return gaps / len(confidence), rows


def auc(scores: NDArray[np.float64], positive: NDArray[np.bool_]) -> float:
    """The probability that a positive document has a higher score than a negative one; a tie counts half."""
    _, inverse, counts = np.unique(scores, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[inverse]
    own, others = int(positive.sum()), int((~positive).sum())
    return float((ranks[positive].sum() - own * (own + 1) / 2) / (own * others))


def average_precision(scores: NDArray[np.float64], positive: NDArray[np.bool_]) -> float:
    """The mean of the precision at each recall, over thresholds from the highest score down, weighted by the
    gain in recall; equal scores are one threshold."""
    order = np.argsort(-scores, kind="stable")
    ends = np.append(np.flatnonzero(np.diff(scores[order])), len(scores) - 1)
    hits = np.cumsum(positive[order])[ends]
    return float((np.diff(hits, prepend=0) / hits[-1] * hits / (ends + 1)).sum())


def thresholds(
    scores: NDArray[np.floating[Any]], languages: NDArray[np.str_], percentiles: Sequence[float]
) -> Thresholds:
    """Percentiles of the scores, interpolated by numpy's default: over all documents under "", and over those
    of each language that a document states."""
    values = scores.astype(np.float64)
    groups = {ALL: values} | {str(name): values[languages == name] for name in np.unique(languages) if name}
    names = {percentile: percentile_name(percentile) for percentile in percentiles}
    return {
        language: {name: float(np.percentile(own, percentile)) for percentile, name in names.items()}
        for language, own in groups.items()
    }
