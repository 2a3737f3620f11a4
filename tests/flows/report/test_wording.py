"""Values of a report as people read them."""

from __future__ import annotations

from flows.report.run_data import StageContent
from flows.report.wording import elided, shown, signed, stage_lines


def test_long_name_keeps_its_end() -> None:
    assert elided("evaluate-aligned-qrpo", 20) == "evaluate-…igned-qrpo"
    assert elided("evaluate-aligned-dpo", 20) == "evaluate-aligned-dpo"


def test_a_box_has_the_first_number_and_the_tokens() -> None:
    def lines(**result: float) -> list[str]:
        return stage_lines(StageContent("a", "corpus", "", [], [], [], result))

    assert lines(tokens=1_200_000, documents=25_120) == ["documents 25,120", "1.2M tokens"]
    assert lines(tokens=1_200_000, sources=3) == ["sources 3", "1.2M tokens"]
    assert lines(loss=2.17654, perplexity=8.8157, accuracy=0.5) == ["loss 2.177", "perplexity 8.816"]
    assert lines(tokens=1_200_000, vocab_size=512) == ["vocab size 512"]


def test_a_difference_has_a_sign() -> None:
    assert [signed(value) for value in (0.0123456, -2.0, None)] == ["+0.01235", "-2", "–"]


def test_shown_values_are_short() -> None:
    assert [shown(value) for value in (True, None, 12_345, 0.123456, {"length": 3}, [1, 2], {})] == [
        "yes", "–", "12,345", "0.12346", "length 3", "1, 2", "–",
    ]  # fmt: skip
