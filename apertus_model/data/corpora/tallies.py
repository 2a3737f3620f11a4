"""Counts of the documents of a corpus by language, and of those that robots.txt excludes by host and agent.

The units that see what became of documents write `tallies.parquet`, a row for each group; `total` adds them.

Invariant: the totals are a function of the set of documents. Memory grows with languages times filters, and
excluded hosts.
"""

from collections.abc import Iterable, Sequence
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

FILE = "tallies.parquet"
KEPT = "kept"
TOP = 50  # languages and hosts in the metrics; the files have all
KEY = ("language", "domain", "agents")
SCHEMA = pa.schema(
    [
        ("outcome", pa.string()),  # label of the step that dropped the documents, or `kept`
        ("language", pa.string()),  # the column `language`; null if the document has none
        ("domain", pa.string()),  # host or listed domain, of documents that robots.txt excludes
        ("agents", pa.string()),  # the agents that robots.txt keeps out, joined by commas
        ("documents", pa.int64()),
        ("characters", pa.int64()),  # of the text as read
        ("tokens", pa.int64()),  # of kept documents, and those that excluded ones would have
    ]
)
COUNTS = ("documents", "characters", "tokens")


def added(
    so_far: pa.Table, outcomes: pa.Array, records: pa.RecordBatch, tokens: NDArray[np.int64]
) -> pa.Table:
    """The groups so far with more documents added: their outcomes, records (`records.py`) and tokens, 0 for
    those that are neither kept nor excluded."""
    ones = pa.array(np.ones(len(tokens), np.int64))
    keys = [records.column(name).cast(pa.string()) for name in ("language", "excluded", "agents")]
    columns = [outcomes, *keys, ones, records.column("characters"), pa.array(tokens)]
    return _grouped(pa.concat_tables([so_far, pa.Table.from_arrays(columns, schema=SCHEMA)]))


def total(files: Iterable[BinaryIO]) -> pa.Table:
    """The groups of all units, with the columns of `SCHEMA`, sorted."""
    tables = [pq.read_table(file, schema=SCHEMA) for file in files]
    groups = _grouped(pa.concat_tables([SCHEMA.empty_table(), *tables]))
    return groups.sort_by([(name, "ascending") for name in ("outcome", *KEY)])


def _grouped(rows: pa.Table, by: Sequence[str] = ("outcome", *KEY)) -> pa.Table:
    groups = rows.group_by([*by]).aggregate([(name, "sum") for name in COUNTS])
    return groups.select([*by, *(f"{name}_sum" for name in COUNTS)]).rename_columns([*by, *COUNTS])


def languages(groups: pa.Table) -> pa.Table:
    """Documents, characters and tokens by language and outcome."""
    by = ("language", "outcome")
    return _grouped(groups, by).sort_by([(name, "ascending") for name in by])


def excluded(groups: pa.Table, steps: Sequence[str]) -> list[dict[str, Any]]:
    """Rows of domain, agent, documents, characters, tokens for the documents that the steps (labels of robots
    filters) dropped, sorted. A document counts for each agent, and once for `(any)`."""
    sums: dict[tuple[str, str], list[int]] = {}
    for row in groups.filter(pc.is_in(groups["outcome"], pa.array(list(steps), pa.string()))).to_pylist():
        if row["domain"] is None:
            continue
        for agent in ("(any)", *row["agents"].split(",")):
            counts = sums.setdefault((row["domain"], agent), [0] * len(COUNTS))
            counts[:] = [before + row[name] for before, name in zip(counts, COUNTS, strict=True)]
    return [
        {"domain": domain, "agent": agent, **dict(zip(COUNTS, counts, strict=True))}
        for (domain, agent), counts in sorted(sums.items())
    ]


def top_languages(table: pa.Table) -> dict[str, dict[str, dict[str, int]]]:
    """The non-zero counts of each outcome, for the TOP languages by characters that were read."""
    by_language: dict[str, dict[str, dict[str, int]]] = {}
    for row in table.to_pylist():
        counts = {name: row[name] for name in COUNTS if row[name]}
        by_language.setdefault(row["language"] or "", {})[row["outcome"]] = counts
    characters = {
        name: sum(counts["characters"] for counts in each.values()) for name, each in by_language.items()
    }
    return {
        name: by_language[name]
        for name in sorted(by_language, key=lambda name: (-characters[name], name))[:TOP]
    }


def top_domains(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The TOP domains by characters that were dropped."""
    once = [row for row in rows if row["agent"] == "(any)"]
    return sorted(once, key=lambda row: (-row["characters"], row["domain"]))[:TOP]
