"""The measure and the table of docs/numerics.md."""

import json
import math
import re
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.numerics import BEGIN, DOCS, END, Numerics, largest_difference, table


def test_the_largest_difference_is_found_in_any_kind_of_value() -> None:
    assert largest_difference(torch.tensor([1.0, 2.5]), torch.tensor([1.5, 2.25])) == 0.5
    assert largest_difference(np.array([1, 5]), np.array([1, 2])) == 3.0
    assert largest_difference(b"ab", b"ac") == 1.0
    assert largest_difference(torch.tensor([True]), torch.tensor([False])) == 1.0
    assert largest_difference({"a": [1.0, torch.ones(2)], "b": 2}, {"b": 6, "a": [1.0, torch.ones(2)]}) == 4.0
    assert largest_difference(torch.ones(2, dtype=torch.bfloat16), torch.ones(2, dtype=torch.bfloat16)) == 0.0
    assert largest_difference(torch.tensor(1.0), torch.tensor(1 + 2**-40, dtype=torch.float64)) == 2**-40


def test_a_relative_difference_is_divided_by_what_was_expected() -> None:
    found, expected = torch.tensor([0.0, 3.0, 0.5]), torch.tensor([0.0, 4.0, 0.25])
    assert largest_difference(found, expected, relative_above=0.0) == 1.0
    assert largest_difference(found, expected, relative_above=1.0) == 0.25
    assert largest_difference(torch.tensor([1.0]), torch.tensor([0.0]), relative_above=0.0) == math.inf


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (torch.ones(2), torch.ones(1)),
        (torch.ones(2), torch.ones(2, dtype=torch.bfloat16)),
        (torch.ones(2, dtype=torch.float64), torch.ones(2)),
        ({"a": 1}, {"b": 1}),
        (b"a", b"ab"),
    ],
)
def test_values_of_another_kind_are_not_compared(found: object, expected: object) -> None:
    with pytest.raises(AssertionError):
        largest_difference(found, expected)


@pytest.mark.parametrize("difference", [2e-6, math.nan])
def test_what_is_not_within_the_bound_fails_and_is_not_noted(difference: float) -> None:
    numerics = Numerics()
    with pytest.raises(AssertionError, match=r"loss: .* from float64; allowed is 1e-06"):
        numerics("losses", "loss", source="formula", against="float64", difference=difference, allowed=1e-6)
    assert numerics.rows == {}
    assert math.isnan(largest_difference([1.0, math.nan, 3.0], [2.0, 2.0, 2.0]))


def test_rows_are_merged_and_stand_by_section_and_quantity(tmp_path: Path) -> None:
    (tmp_path / "numerics.md").write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    for quantities in (["70b", "8b"], ["Zero", "8b", "alpha"]):
        numerics = Numerics()
        for difference, quantity in enumerate(quantities):
            numerics("model", quantity, source="s", against="t", difference=float(difference), allowed=9.0)
        numerics("data", "bytes", source="s", against="t", difference=0.0, allowed=0.0)
        numerics.write(tmp_path)
    keys = [f"model | {name} | t" for name in ("8b", "70b", "alpha", "Zero")] + ["data | bytes | t"]
    assert list(json.loads((tmp_path / "numerics.json").read_text())) == keys
    page = (tmp_path / "numerics.md").read_text()
    assert page.startswith(f"before\n{BEGIN}\n\n### Model\n") and page.endswith(f"{END}\nafter\n")
    assert "old" not in page
    assert [line.split(" | ")[:3] for line in page.splitlines() if re.match(r"\| (?!quantity)", line)] == [
        ["| 8b", "s", "t"], ["| 70b", '"', '"'], ["| alpha", '"', '"'], ["| Zero", '"', '"'],
        ["| bytes", "s", "t"],
    ]  # fmt: skip


def test_the_page_shows_what_was_measured() -> None:
    stored = json.loads((DOCS / "numerics.json").read_text())
    assert (DOCS / "numerics.md").read_text().partition(BEGIN + "\n")[2] == table(stored) + END + "\n"
    assert all(
        row[device] <= row["allowed"]
        for row in stored.values()
        for device in ("cpu", "cuda")
        if device in row
    )
