"""The table of docs/numerics.md, written by the tests that stand behind its rows.

`numerics(...)` in a test asserts that a difference is within what is allowed. With `--numerics` the largest differences of the run go
into docs/numerics.json, from which the page's table is made; rows of tests that did not run stay.

Invariant: every number of the table was measured by the test that asserts it.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

DOCS = Path(__file__).parents[1] / "docs"
BEGIN, END = "<!-- table: written by `make numerics` -->", "<!-- end of table -->"
SECTIONS = ("model", "parallelism", "optimizers", "schedules", "losses")


@dataclass
class Numerics:
    """Largest differences of a run: (section, quantity, against) -> row."""

    rows: dict[tuple[str, str, str], dict[str, str | float]] = field(default_factory=dict)

    def __call__(self, section: str, quantity: str, *, source: str, against: str, difference: float, allowed: float) -> None:
        """Asserts difference <= allowed, and notes it.

        Args:
            section: one of SECTIONS.
            quantity: what was computed, with its unit where it is not relative.
            source: formula or place it was published.
            against: the independent truth.
            difference: the largest one of this test, absolute unless `quantity` says otherwise; 0 means the same bits.
            allowed: the bound.
        """
        assert section in SECTIONS
        assert not math.isnan(difference) and difference <= allowed, f"{quantity}: {difference:.3g} from {against}; allowed is {allowed:g}"
        device = "cuda" if torch.cuda.is_available() else "cpu"
        row = self.rows.setdefault((section, quantity, against), {"source": source, device: 0.0, "allowed": allowed})
        row[device] = max(float(row[device]), difference)
        row["allowed"] = max(float(row["allowed"]), allowed)

    def write(self, folder: Path) -> None:
        """Merges the rows into `numerics.json`, and renders the table of `numerics.md` anew."""
        data = folder / "numerics.json"
        stored = json.loads(data.read_text()) if data.exists() else {}
        for (section, quantity, against), row in self.rows.items():
            key = f"{section} | {quantity} | {against}"
            stored[key] = stored.get(key, {}) | row
        data.write_text(json.dumps(stored, indent=1, sort_keys=True, ensure_ascii=False) + "\n")
        page = folder / "numerics.md"
        before, _, rest = page.read_text().partition(BEGIN)
        page.write_text(before + BEGIN + "\n" + table(stored) + END + rest.partition(END)[2])


def table(stored: dict[str, dict[str, str | float]]) -> str:
    """The rows as Markdown, by section; a column for a GPU where a row has been measured on one."""
    devices = ["cpu", *(["cuda"] if any("cuda" in row for row in stored.values()) else [])]
    titles = {"cpu": "largest difference", "cuda": "on a GPU"}
    text = ""
    for section in SECTIONS:
        rows = [(key.split(" | "), row) for key, row in sorted(stored.items()) if key.startswith(f"{section} |")]
        if not rows:
            continue
        text += f"\n### {section.capitalize()}\n\n| quantity | formula and source | checked against | "
        text += " | ".join(titles[device] for device in devices) + " | allowed |\n|---|---|---|" + "---|" * (len(devices) + 1) + "\n"
        for (_, quantity, against), row in rows:
            seen = [_number(row[device]) if device in row else "" for device in devices]
            text += f"| {quantity} | {row['source']} | {against} | {' | '.join(seen)} | {_number(row['allowed'])} |\n"
    return text + "\n"


def _number(value: str | float) -> str:
    return "0" if float(value) == 0 else f"{float(value):.1e}"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--numerics", action="store_true", help="write the largest differences into docs/numerics.json and docs/numerics.md")


@pytest.fixture(scope="session")
def numerics() -> Numerics:
    return _THIS_RUN


def pytest_sessionfinish(session: pytest.Session) -> None:
    if session.config.getoption("--numerics") and _THIS_RUN.rows:
        _THIS_RUN.write(DOCS)


_THIS_RUN = Numerics()
