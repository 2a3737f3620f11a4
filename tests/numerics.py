"""The table of docs/numerics.md, written by the tests that stand behind its rows.

`numerics(...)` in a test asserts that a difference is within what is allowed. With `--numerics` the largest
differences of the run go into docs/numerics.json, from which the page's table is made; rows of tests that did
not run stay.

Invariant: every number of the table was measured by the test that asserts it.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

DOCS = Path(__file__).parents[1] / "docs"
BEGIN, END = "<!-- table: written by `make numerics` -->", "<!-- end of table -->"
SECTIONS = ("model", "parallelism", "optimizers", "schedules", "losses", "data")
SEPARATOR, DITTO = " | ", '"'


def largest_difference(found: Any, expected: Any, *, relative_above: float | None = None) -> float:
    """The largest difference of two tensors, in float64; absolute, or relative to the expected value where
    that is large enough.

    Args:
        found, expected: numbers, arrays, tensors or bytes of equal shape and dtype; or two mappings with the
        same keys, or two sequences of
            the same length, of these. `expected` may be float64 whatever `found` is: a truth.
        relative_above: divide each difference by the size of the expected value, or by this number where the
        size is smaller. With 0, a
            difference from an expected 0 is infinite.
    """
    if isinstance(expected, Mapping):
        assert found.keys() == expected.keys()
        found, expected = [found[name] for name in expected], list(expected.values())
    if isinstance(expected, list | tuple):
        parts = [
            largest_difference(a, b, relative_above=relative_above)
            for a, b in zip(found, expected, strict=True)
        ]
        return torch.tensor(parts, dtype=torch.float64).max().item()  # not a number, if one of them is not
    a, b = _tensor(found), _tensor(expected)
    assert a.shape == b.shape, (a.shape, b.shape)
    assert a.dtype == b.dtype or b.dtype == torch.float64, (a.dtype, b.dtype)
    differences = (a.double() - b.double()).abs().flatten()
    if relative_above is not None:
        differences = torch.where(
            differences > 0, differences / b.double().abs().clamp(min=relative_above).flatten(), differences
        )
    return differences.max().item() if differences.numel() else 0.0


def _tensor(value: Any) -> torch.Tensor:
    if isinstance(value, bytes):
        return torch.frombuffer(bytearray(value), dtype=torch.uint8)
    return torch.as_tensor(value, dtype=torch.float64 if isinstance(value, float) else None).detach()


@dataclass
class Numerics:
    """Largest differences of a run: (section, quantity, against) -> row."""

    rows: dict[tuple[str, str, str], dict[str, str | float]] = field(default_factory=dict)

    def __call__(
        self, section: str, quantity: str, *, source: str, against: str, difference: float, allowed: float
    ) -> None:
        """Asserts difference <= allowed, and notes it; of calls with the same section, quantity and truth,
        the largest of both.

        Args:
            section: one of SECTIONS. quantity: what was computed, with its unit where it is not relative.
            source: formula or place it was published. against: the independent truth. difference: the largest
            one of this test, absolute unless `quantity` says otherwise; 0 means the same bits. allowed: the
            bound.
        """
        assert section in SECTIONS
        assert not any("|" in text for text in (quantity, source, against)), "a | ends a cell of the table"
        assert not math.isnan(difference) and difference <= allowed, (
            f"{quantity}: {difference:.3g} from {against}; allowed is {allowed:g}"
        )
        device = "cuda" if torch.cuda.is_available() else "cpu"
        row = self.rows.setdefault(
            (section, quantity, against), {"source": source, device: 0.0, "allowed": allowed}
        )
        assert row["source"] == source, f"{quantity} has two sources: {row['source']}; {source}"
        row[device] = max(float(row[device]), difference)
        row["allowed"] = max(float(row["allowed"]), allowed)

    def write(self, folder: Path) -> None:
        """Merges the rows into `numerics.json`, and renders the table of `numerics.md` anew."""
        data = folder / "numerics.json"
        stored = json.loads(data.read_text()) if data.exists() else {}
        for names, row in self.rows.items():
            key = SEPARATOR.join(names)
            stored[key] = stored.get(key, {}) | row
        stored = {key: dict(sorted(stored[key].items())) for key in sorted(stored, key=_place)}
        data.write_text(json.dumps(stored, indent=1, ensure_ascii=False) + "\n")
        page = folder / "numerics.md"
        before, _, rest = page.read_text().partition(BEGIN)
        page.write_text(before + BEGIN + "\n" + table(stored) + END + rest.partition(END)[2])


def _place(key: str) -> tuple[int, list[str | int], str]:
    """Where a row stands: by section in their order, then by quantity and truth; 8b before 70b, whatever
    the case of letters."""
    section, _, names = key.partition(SEPARATOR)
    parts = re.split("([0-9]+)", names.casefold())  # every other part is a number
    return (
        SECTIONS.index(section),
        [int(part) if index % 2 else part for index, part in enumerate(parts)],
        names,
    )


def _truth(key: str, stored: dict[str, dict[str, str | float]]) -> tuple[str, str]:
    """The source of a row, and what it was checked against."""
    return str(stored[key]["source"]), key.rpartition(SEPARATOR)[2]


def table(stored: dict[str, dict[str, str | float]]) -> str:
    """The rows as Markdown, by section, source and truth; a column for a GPU where a row has been measured on
    one. A source, or a truth, that repeats the one above is a ditto mark."""
    devices = ["cpu", *(["cuda"] if any("cuda" in row for row in stored.values()) else [])]
    titles = {"cpu": "largest difference", "cuda": "on a GPU"}
    text = ""
    for section in SECTIONS:
        rows = [
            (key.split(SEPARATOR), stored[key])
            for key in sorted(sorted(stored, key=_place), key=lambda key: _truth(key, stored))
            if key.startswith(section + SEPARATOR)
        ]
        if not rows:
            continue
        text += f"\n### {section.capitalize()}\n\n| quantity | formula and source | checked against | "
        text += (
            " | ".join(titles[device] for device in devices)
            + " | allowed |\n|---|---|---|"
            + "---|" * (len(devices) + 1)
            + "\n"
        )
        above = ["", ""]
        for (_, quantity, against), row in rows:
            seen = [_number(row[device]) if device in row else "" for device in devices]
            cells = [str(row["source"]), against]
            shown = [DITTO if cell == before else cell for cell, before in zip(cells, above, strict=True)]
            text += f"| {' | '.join([quantity, *shown, *seen, _number(row['allowed'])])} |\n"
            above = cells
    return text + "\n"


def _number(value: str | float) -> str:
    number = float(value)
    return f"{number:.2g}" if number == 0 or number >= 0.1 else f"{number:.1e}".replace(".0e", "e")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--numerics",
        action="store_true",
        help="write the largest differences into docs/numerics.json and docs/numerics.md",
    )


@pytest.fixture(scope="session")
def numerics() -> Numerics:
    return _THIS_RUN


def pytest_sessionfinish(session: pytest.Session) -> None:
    if session.config.getoption("--numerics") and _THIS_RUN.rows:
        _THIS_RUN.write(DOCS)


_THIS_RUN = Numerics()
