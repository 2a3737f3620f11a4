from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from apertus_model.data.corpora.filters import Drop
from infra.store.inputs import SourceError
from specs.filters import TOXICITY_THRESHOLDS

Judge = Callable[..., Drop | None]


def test_toxicity_is_compared_with_the_threshold_of_the_language(judge: Judge) -> None:
    spec = {"filter": "toxicity", "classifier": "apertus-xlmr-1"}
    cases = [
        *(
            ("deu_Latn", 0.9976, True),
            ("deu_Latn", 0.9977, False),
            ("de", 0.998, False),
            ("de-CH", 0.998, False),
            ("fra", 0.998, True),
        ),
        *(("cmn_Hani", 0.6, False), ("zh", 0.59, True), ("rus_Cyrl", 1.0, True)),
        *(("en", 0.99944, True), ("eng_Latn", 0.999441, False)),
    ]
    for language, score, passes in cases:
        assert (judge(spec, language=language, toxic_score=score) is None) is passes, (language, score)
    published = {
        "de": 0.9977,
        "fr": 0.9994,
        "pl": 0.9867,
        "pt": 0.9476,
        "es": 0.9953,
        "it": 0.9985,
        "zh": 0.5954,
        "nl": 0.9883,
        "en": 0.999440610408783,
    }
    assert {code: TOXICITY_THRESHOLDS[code] for code in published} == published
    assert judge(spec, language="de", toxic_score=0.999) == Drop(
        "0.999 by apertus-xlmr-1", "below 0.9977 for de"
    )
    with pytest.raises(
        SourceError, match="nothing in column 'toxic_score', which a filter needs; it has language"
    ):
        judge(spec, language="de")
    assert judge(spec, language="ru") is None


def test_scores_are_kept_from_the_cutoff_on(judge: Judge) -> None:
    spec = {"filter": "score", "column": "edu", "min": 2, "max": 4.5}
    assert [value for value in (1.99, 2, 3, 4.5, 4.6) if judge(spec, edu=value) is None] == [2, 3, 4.5]
    by = {"filter": "score", "column": "edu", "min": 2, "by": "language", "cutoffs": {"de": 0.5}}
    assert [judge(by, edu=1, language=language) is None for language in ("de", "fr", None)] == [
        True,
        False,
        False,
    ]
    assert judge(spec, edu="3.5") is None
    with pytest.raises(SourceError, match="column 'edu' holds 'high', which is not a number"):
        judge(spec, edu="high")


def test_a_sample_has_its_rate_and_lower_rates_lie_in_higher_ones(judge: Judge) -> None:
    texts = [f"document {i}" for i in range(1000)]
    kept = {
        rate: {text for text in texts if judge({"filter": "sample", "rate": rate}, text) is None}
        for rate in (0.0, 0.095, 0.3135, 1.0)
    }
    assert kept[0.0] == set() and kept[1.0] == set(texts)
    assert kept[0.095] < kept[0.3135]
    for rate in (0.095, 0.3135):  # four standard deviations of a binomial
        assert abs(len(kept[rate]) / 1000 - rate) < 4 * (rate * (1 - rate) / 1000) ** 0.5
    other = {text for text in texts if judge({"filter": "sample", "rate": 0.3135, "seed": 1}, text) is None}
    assert 0.2 < len(other & kept[0.3135]) / len(other) < 0.43
    by = {"filter": "sample", "rate": 1, "by": "language", "rates": {"xx": 0}}
    assert [judge(by, language=language) is None for language in ("xx", "de", None)] == [False, True, True]


def test_only_allowed_licences_pass(judge: Judge) -> None:
    spec = {"filter": "license", "allow": ["MIT", "CC-BY-4.0"]}
    assert [name for name in ("mit", "CC-BY-4.0 ", "GPL-3.0", "") if judge(spec, license=name) is None] == [
        "mit",
        "CC-BY-4.0 ",
    ]
    assert judge(spec) == Drop("nothing", "a value in column 'license'")
    assert judge(spec, license="GPL-3.0") == Drop("GPL-3.0", "an allowed licence")


def test_a_filter_can_be_limited_to_documents_by_any_column(judge: Judge) -> None:
    spec = {"filter": "length", "min_characters": 100, "only": {"language": ["deu", "fra"], "part": ["2"]}}
    cases = [("deu", 2, False), ("fra", "2", False), ("deu", 1, True), ("rus", 2, True), (None, 2, True)]
    for language, part, passes in cases:
        assert (judge(spec, language=language, part=part) is None) is passes
    assert judge(spec) is None
    licence = {"filter": "license", "allow": ["MIT"], "only": {"source": ["code"]}}
    assert [judge(licence, source=name) is None for name in ("code", "web")] == [False, True]
    questions = {"filter": "score", "column": "stars", "min": 2, "only": {"language": ["deu"]}}
    assert (
        judge(questions, language="fra") is None
    )  # its missing column is no error where it is not asked for
    with pytest.raises(SourceError, match="stars"):
        judge(questions, language="deu")


@pytest.mark.parametrize(
    ("spec", "text", "expected"),
    [  # the general cut-off drops the text, or keeps it; that of `zho` does the opposite
        ({"filter": "length", "min_characters": 9, "cutoffs": {"zho": 4}}, "中文文字", "at least 9"),
        ({"filter": "alphabetic", "min_share": 0.9, "cutoffs": {"zho": 0.5}}, "abc1", "at least 0.9"),
        ({"filter": "repeated-lines", "max_share": 0.1, "cutoffs": {"zho": 0.9}}, "a\na\n", "at most 0.1"),
    ],
)
def test_cutoffs_differ_by_language(judge: Judge, spec: dict[str, Any], text: str, expected: str) -> None:
    by = {**spec, "by": "language"}
    for language in ("deu", None):
        drop = judge(by, text, language=language)
        assert drop is not None and drop.rule == expected
    assert judge(by, text, language="zho") is None
