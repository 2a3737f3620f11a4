"""Counts of the documents of a corpus by language, and of those that robots.txt excludes by host and agent.

A task writes `tallies.parquet`: a row for each group of documents whose outcome it knows, and a row for each
document that a step over the whole source decides (`outcome` null), in the order of its records. `total` adds
the tasks up.

Invariant: the totals are a function of the set of documents. Memory grows with the number of groups: of
languages times filters, and of excluded hosts.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from datatrove.data import Document
from numpy.typing import NDArray

from apertus_model.data.filters import Drop

KEPT = "kept"
TOP = 50  # languages and hosts in the metrics; the files have all
KEY = ("language", "domain", "agents")
SCHEMA = pa.schema(
    [
        ("outcome", pa.string()),  # label of the step that dropped the documents, or `kept`; null: undecided
        ("language", pa.string()),  # the column `language`; null where there is none
        ("domain", pa.string()),  # host or listed domain, of documents that robots.txt excludes
        ("agents", pa.string()),  # the agents that it keeps out, joined by commas
        ("documents", pa.int64()),
        ("characters", pa.int64()),  # of the text as read
        ("tokens", pa.int64()),  # of kept documents
    ]
)
COUNTS = ("documents", "characters", "tokens")
Key = tuple[str | None, ...]


class Tally:
    """The counts of one task."""

    def __init__(self) -> None:
        self._decided: dict[Key, list[int]] = {}
        self._keys: dict[Key, int] = {}
        self._open = array("I")
        self._characters = array("Q")

    def add(self, document: Document, characters: int, drop: Drop | None, outcome: str | None) -> None:
        """Counts a document. `outcome`: the step that dropped it; None for one that has a record."""
        language = document.metadata.get("language")
        excluded: tuple[str | None, str | None] = (None, None)
        if drop is not None and drop.excluded is not None:
            excluded = drop.excluded.domain, ",".join(drop.excluded.agents)
        key = (None if language is None else str(language), *excluded)
        if outcome is None:
            self._open.append(self._keys.setdefault(key, len(self._keys)))
            self._characters.append(characters)
            return
        counts = self._decided.setdefault((outcome, *key), [0, 0])
        counts[0] += 1
        counts[1] += characters

    def write(self, path: Path) -> None:
        """Writes the rows."""
        decided = [
            dict(zip(SCHEMA.names, (*key, *counts, 0), strict=True)) for key, counts in self._decided.items()
        ]
        columns = list(zip(*self._keys, strict=True)) or [()] * len(KEY)
        indices = pa.array(np.frombuffer(self._open, np.uint32) if self._open else [], pa.uint32())
        number = len(self._open)
        each = {
            name: pa.array(values, pa.string()).take(indices)
            for name, values in zip(KEY, columns, strict=True)
        }
        undecided = pa.table(
            {
                "outcome": pa.nulls(number, pa.string()),
                **each,
                "documents": pa.array(np.ones(number, np.int64)),
                "characters": pa.array(np.array(self._characters, np.int64)),
                "tokens": pa.array(np.zeros(number, np.int64)),
            },
            schema=SCHEMA,
        )
        rows = pa.concat_tables([pa.Table.from_pylist(decided, schema=SCHEMA), undecided])
        pq.write_table(rows, path, compression="zstd")


class Task(NamedTuple):
    """What has become of the documents of a task that have a record."""

    tallies: Path
    outcomes: NDArray[np.integer]  # (records,): index of a step, or the number of steps for kept ones
    tokens: NDArray[np.integer]  # (records,): 0 for those that are not kept


def total(tasks: Iterable[Task], steps: Sequence[str]) -> pa.Table:
    """The groups of all tasks, with the columns of `SCHEMA`, sorted."""
    names = pa.array([*steps, KEPT])
    so_far = SCHEMA.empty_table()
    for task in tasks:
        rows = pq.read_table(task.tallies, schema=SCHEMA)
        undecided = pc.is_null(rows["outcome"])
        open_rows = rows.filter(undecided)
        open_rows = open_rows.set_column(0, "outcome", names.take(pa.array(task.outcomes, pa.int64())))
        open_rows = open_rows.set_column(6, "tokens", pa.array(task.tokens, pa.int64()))
        so_far = _grouped(
            pa.concat_tables([so_far, rows.filter(pc.invert(undecided)), open_rows.cast(SCHEMA)])
        )
    return so_far.sort_by([(name, "ascending") for name in ("outcome", *KEY)])


def _grouped(rows: pa.Table) -> pa.Table:
    groups = rows.group_by(["outcome", *KEY]).aggregate([(name, "sum") for name in COUNTS])
    return groups.select(["outcome", *KEY, *(f"{name}_sum" for name in COUNTS)]).rename_columns(SCHEMA.names)


def languages(groups: pa.Table) -> pa.Table:
    """Documents, characters and tokens by language and outcome."""
    by = ["language", "outcome"]
    found = groups.group_by(by).aggregate([(name, "sum") for name in COUNTS])
    names = [*by, *(f"{name}_sum" for name in COUNTS)]
    return found.select(names).rename_columns([*by, *COUNTS]).sort_by([(name, "ascending") for name in by])


def excluded(groups: pa.Table, steps: Sequence[str]) -> list[dict[str, Any]]:
    """Rows of domain, agent, documents, characters for the documents that the steps (labels of robots
    filters) dropped, sorted. A document counts for each agent, and once for `(any)`."""
    sums: dict[tuple[str, str], list[int]] = {}
    for row in groups.filter(pc.is_in(groups["outcome"], pa.array(list(steps), pa.string()))).to_pylist():
        if row["domain"] is None:
            continue
        for agent in ("(any)", *row["agents"].split(",")):
            counts = sums.setdefault((row["domain"], agent), [0, 0])
            counts[0] += row["documents"]
            counts[1] += row["characters"]
    return [
        {"domain": domain, "agent": agent, "documents": documents, "characters": characters}
        for (domain, agent), (documents, characters) in sorted(sums.items())
    ]


def top_languages(table: pa.Table) -> dict[str, dict[str, dict[str, int]]]:
    """The TOP languages by characters that were read: counts of each outcome that has any."""
    found: dict[str, dict[str, dict[str, int]]] = {}
    for row in table.to_pylist():
        counts = {name: row[name] for name in COUNTS if row[name]}
        found.setdefault(row["language"] or "", {})[row["outcome"]] = counts
    read = {name: sum(counts["characters"] for counts in each.values()) for name, each in found.items()}
    return {name: found[name] for name in sorted(found, key=lambda name: (-read[name], name))[:TOP]}


def top_domains(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The TOP domains by characters that were dropped."""
    once = [row for row in rows if row["agent"] == "(any)"]
    return sorted(once, key=lambda row: (-row["characters"], row["domain"]))[:TOP]
