"""Counts by language, host and agent."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from apertus_model.data.corpora.tallies import (
    SCHEMA,
    added,
    excluded,
    languages,
    top_domains,
    top_languages,
    total,
)

CLOSED = ("a.example", "CCBot,GPTBot")


def table(*rows: tuple[str, str | None, int, int, tuple[str, str] | tuple[None, None]]) -> pa.Table:
    """Rows of outcome, language, characters, tokens, and domain with agents; added two at a time."""
    found = SCHEMA.empty_table()
    for start in range(0, len(rows), 2):
        outcomes, language, characters, tokens, closed = zip(*rows[start : start + 2], strict=True)
        columns = {
            "language": pa.array(language, pa.large_string()),
            "excluded": pa.array([domain for domain, _ in closed], pa.large_string()),
            "agents": pa.array([agents for _, agents in closed], pa.large_string()),
            "characters": pa.array(characters, pa.int64()),
        }
        found = added(found, pa.array(outcomes), pa.record_batch(columns), np.array(tokens, np.int64))
    return found


def test_units_are_added_up_in_any_order(tmp_path: Path) -> None:
    nowhere = (None, None)
    tables = {
        "one": table(
            ("robots", "deu", 10, 6, CLOSED),
            ("robots", "deu", 20, 9, CLOSED),
            ("kept", "deu", 5, 4, nowhere),
            ("exact-duplicates", "fra", 7, 0, nowhere),
        ),
        # the second would be excluded, and is a duplicate before that
        "two": table(("length", None, 3, 0, nowhere), ("exact-duplicates", "fra", 9, 0, CLOSED)),
    }
    for name, rows in tables.items():
        pq.write_table(rows, tmp_path / name)
    groups = total_of(tmp_path, *tables)
    assert groups.equals(total_of(tmp_path, *reversed(tables)))
    assert top_languages(languages(groups)) == {
        "deu": {
            "kept": {"documents": 1, "characters": 5, "tokens": 4},
            "robots": {"documents": 2, "characters": 30, "tokens": 15},
        },
        "fra": {"exact-duplicates": {"documents": 2, "characters": 16}},
        "": {"length": {"documents": 1, "characters": 3}},
    }
    rows = excluded(groups, ["robots"])
    counts = {"documents": 2, "characters": 30, "tokens": 15}
    assert rows == [
        {"domain": "a.example", "agent": agent, **counts} for agent in ("(any)", "CCBot", "GPTBot")
    ]
    assert top_domains(rows) == rows[:1]


def total_of(folder: Path, *names: str) -> pa.Table:
    return total((folder / name).open("rb") for name in names)


def test_no_documents_are_no_groups() -> None:
    groups = total([])
    assert (
        groups.num_rows == 0 and excluded(groups, ["robots"]) == [] and top_languages(languages(groups)) == {}
    )
