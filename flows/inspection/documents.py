"""What became of one document of a corpus: `apertus inspect SPEC NAME --document ID`.

Invariant: reads the tables of kept and of removed documents only, one row group at a time.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from rich.console import Console
from rich.markup import escape

from flows.inspection.common import Options, artifact
from flows.planning.graph import Node
from flows.planning.plan import Plan
from flows.terminal import empty_table
from infra.store import Artifact

_HASH = re.compile(r"[0-9a-f]{16}")


def collect(plan: Plan, node: Node, options: Options) -> dict[str, Any]:
    """What `find_documents` finds in a part of a corpus that has been made."""
    assert options.document is not None, "inspect --document calls this"
    corpus = artifact(plan, node)
    return {
        "name": corpus.identity.name,
        "kind": "corpus",
        "document": options.document,
        "documents": find_documents(corpus, options.document),
    }


def find_documents(corpus: Artifact, wanted: str) -> list[dict[str, Any]]:
    """The documents with an id or a URL, or with a hash (16 hexadecimal digits) of their text as read: kept
    ones first, in the order of training, then removed ones.

    Returns:
        Rows of `became` (`train`, `validation`, or the label of the filter that removed it), `hash`, `id`,
        `url`; for a kept one `file`, `row` (in the file, from 0), `offset` (of its first token) and `tokens`
        (how many it has); for a removed one `reason`.
    """
    facts = corpus.manifest.facts
    found = [
        {"became": split, "file": f"{shard}.bin", "row": number}
        | {name: row[name] for name in ("hash", "id", "url", "offset", "tokens")}
        for split in ("train", "validation")
        for shard in facts[split]
        for number, row in _rows(corpus, f"{shard}.documents.parquet", wanted)
    ]
    found += [
        {"became": row["filter"]} | {name: row.get(name) for name in ("hash", "id", "url", "reason")}
        for name in facts["rejects"]
        for _, row in _rows(corpus, f"{name}.parquet", wanted)
    ]
    return [row | {"hash": f"{row['hash']:016x}"} for row in found]


def _rows(corpus: Artifact, name: str, wanted: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """The rows of a table that are of the wanted documents, with their numbers."""
    import numpy as np  # here, not above: other commands start without them
    import pyarrow as pa
    import pyarrow.compute as pc
    import pyarrow.parquet as pq

    table = pq.ParquetFile(corpus.open(name).stream())
    by_hash = _HASH.fullmatch(wanted) is not None
    value = pa.scalar(int(wanted, 16), pa.uint64()) if by_hash else pa.scalar(wanted)
    columns = ["hash"] if by_hash else [key for key in ("id", "url") if key in table.schema_arrow.names]
    start = 0
    for group in range(table.num_row_groups):
        keys = table.read_row_group(group, columns=columns)
        same = np.zeros(len(keys), bool)
        for column in keys.columns:
            same |= pc.fill_null(pc.equal(column, value), False).to_numpy()
        if same.any():
            rows = table.read_row_group(group).filter(pa.array(same)).to_pylist()
            yield from zip((np.flatnonzero(same) + start).tolist(), rows, strict=True)
        start += len(keys)


def show(console: Console, found: dict[str, Any]) -> None:
    """Prints what `collect` has found."""
    rows = found["documents"]
    if not rows:
        console.print(
            f"{escape(found['name'])} has read no document with the id, URL or hash"
            f" '{escape(found['document'])}'",
            highlight=False,
            soft_wrap=True,
        )
        return
    table = empty_table(escape(found["name"]), ("became", "hash", "id", "where or why"))
    for row in rows:
        where = row.get("reason") or f"{row['tokens']:,} tokens from {row['offset']:,} of {row['file']}"
        table.add_row(*(escape(text) for text in (row["became"], row["hash"], row["id"] or "", where)))
    console.print(table)
