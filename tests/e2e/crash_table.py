"""The table of docs/crashes.md, written by the tests that kill.

Invariant: every row is one run of the slow tests of test_crashes.py, the last one with `--crashes`.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

from tests.e2e.crashes import Lineage

Row = dict[str, Any]
DOCS = Path(__file__).parents[2] / "docs"
BEGIN, END = (
    "<!-- table: written by `pytest tests/e2e/test_crashes.py --crashes` -->",
    "<!-- end of table -->",
)


def rows_of(
    store: str, processes: int, seed: int, lineages: list[Lineage], expected: dict[str, Any]
) -> list[Row]:
    """One row: what was killed, how often, and how many of the lineages ended as the uninterrupted run
    did."""
    kills = [kill for lineage in lineages for kill in lineage.kills]
    return [
        {
            "store": store,
            "processes": processes,
            "seed": seed,
            "lineages": len(lineages),
            "kills": len(kills),
            "identical": sum(lineage.result == expected for lineage in lineages),
            "victims": dict(sorted(Counter(kill.victim for kill in kills).items())),
            "parts": dict(sorted(Counter(kill.part for kill in kills).items())),
        }
    ]


def table(rows: list[Row]) -> str:
    """The rows as Markdown."""
    text = (
        "| store | processes | kills | of | in | identical to an uninterrupted run | seed"
        " |\n|---|---|---|---|---|---|---|\n"
    )
    for row in rows:
        victims, parts = (
            ", ".join(f"{name} {count}" for name, count in row[key].items()) for key in ("victims", "parts")
        )
        text += f"| {row['store']} | {row['processes']} | {row['kills']} | {victims} | {parts} "
        text += f"| {row['identical']} of {row['lineages']} | {row['seed']} |\n"
    return text


def write(rows: list[Row], docs: Path = DOCS) -> None:
    """Puts the rows in the place of those of the same store and number of processes."""
    data, page = docs / "crashes.json", docs / "crashes.md"
    stored = {
        (row["store"], row["processes"]): row
        for row in (json.loads(data.read_text()) if data.exists() else [])
    }
    stored |= {(row["store"], row["processes"]): row for row in rows}
    kept = [stored[key] for key in sorted(stored)]
    data.write_text(json.dumps(kept, indent=1) + "\n")
    before, _, rest = page.read_text().partition(BEGIN)
    total, same = sum(row["kills"] for row in kept), sum(row["identical"] for row in kept)
    summary = f"\n{total} kills; {same} of {sum(row['lineages'] for row in kept)} stores identical.\n\n"
    page.write_text(before + BEGIN + "\n" + summary + table(kept) + "\n" + END + rest.partition(END)[2])
