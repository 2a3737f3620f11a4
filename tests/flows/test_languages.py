"""What the metrics of a corpus say of its languages."""

from __future__ import annotations

from typing import Any

import pytest

from apertus_model.data.corpora import tallies
from flows.languages import KEPT, LanguageCounts, filters_of, languages_of


def test_what_was_read_is_what_was_kept_and_what_each_filter_removed() -> None:
    metrics = {
        "filters": ["robots", "length", "score"],
        "languages": {
            "": {"robots": {"documents": 2}, "length": {"characters": 1}},
            "deu_Latn": {
                "kept": {"documents": 7, "tokens": 1234},
                "length": {"documents": 3, "characters": 9},
            },
        },
    }
    found = languages_of(metrics)
    assert found == [
        LanguageCounts("deu_Latn", 10, {"robots": 0, "length": 3, "score": 0}, 7, 1234),
        LanguageCounts("", 2, {"robots": 2, "length": 0, "score": 0}, 0, 0),
    ]
    assert filters_of(found) == ["robots", "length"]


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, []),
        ([1], []),
        ({"de": 3}, []),
        (
            {"de": {"kept": 3, "length": {"documents": "many"}}},
            [LanguageCounts("de", 0, {"length": 0}, 0, 0)],
        ),
        ({"de": {"kept": {"documents": -1, "tokens": True}}}, [LanguageCounts("de", 0, {}, 0, 0)]),
    ],
)
def test_what_has_another_form_is_left_out(value: Any, expected: list[LanguageCounts]) -> None:
    assert languages_of({"languages": value}) == expected


def test_the_label_of_kept_documents_is_that_of_the_stage() -> None:
    assert KEPT == tallies.KEPT
