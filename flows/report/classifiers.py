"""The numbers of trained document classifiers in the report: accuracy by label, calibration, thresholds.

Invariant: files of artifacts are external data. An entry of an unexpected form is left out, without an error.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from flows.report.results import Gate, numbers

COLUMNS = ("documents", "precision", "recall", "auc", "average_precision")
OF_LANGUAGE = ("accuracy", "loss", "calibration_error")
MOST_LANGUAGES = 100  # shown for each label


@dataclass(frozen=True)
class Classified:
    """The numbers of one classifier."""

    name: str
    metrics: dict[str, float]
    labels: dict[str, dict[str, float]]  # metrics by label
    languages: dict[str, dict[str, float]]  # metrics by language, if each language has a model
    reliability: list[dict[str, float]]  # bins of the calibration
    percentiles: list[str]
    thresholds: list[
        tuple[str, str, dict[str, float]]
    ]  # label, language ("" for all), threshold by percentile
    more: int  # languages that are not shown
    gates: list[Gate]

    @classmethod
    def of(cls, name: str, metrics: dict[str, Any], facts: dict[str, Any], gates: list[Gate]) -> Classified:
        """Reads the metrics and facts of a manifest."""
        flat, labels = numbers(metrics), dict[str, dict[str, float]]()
        for key, value in flat.items():
            metric, _, label = key.partition("/")
            if label and metric in COLUMNS:
                labels.setdefault(label, {})[metric] = value
        bins, rows, more = metrics.get("reliability"), [], 0
        for label, languages in _items(facts.get("thresholds")):
            found = [(label, language, numbers(values)) for language, values in _items(languages)]
            rows += found[:MOST_LANGUAGES]
            more += len(found[MOST_LANGUAGES:])
        return cls(
            name,
            {key: value for key, value in flat.items() if "/" not in key},
            labels,
            {name: numbers(values) for name, values in _items(metrics.get("languages"))},
            [numbers(row) for row in bins] if isinstance(bins, list) else [],
            list(dict.fromkeys(percentile for _, _, values in rows for percentile in values)),
            rows,
            more,
            gates,
        )


def _items(value: Any) -> list[tuple[str, Any]]:
    return list(value.items()) if isinstance(value, dict) else []
