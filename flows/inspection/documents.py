"""Shows what became of one document of a corpus: `apertus inspect SPEC NAME --document ID`.

Invariant: reads the tables of kept and of removed documents only, one row group at a time.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, NotRequired, TypedDict

from rich.console import Console
from rich.markup import escape

from flows.inspection.common import Options, artifact
from flows.planning.graph import Node
from flows.planning.plan import Plan
from flows.terminal import empty_table
from infra.store import Artifact

_HASH = re.compile(r"[0-9a-f]{16}")


class Document(TypedDict):
    """A document of a corpus, as read."""

    became: str  # `train`, `validation`, or the label of the filter that removed it
    hash: str  # 16 hexadecimal digits, of the text
    id: str | None
    url: str | None
    file: NotRequired[str]  # of a kept document, as are `row`, `offset` and `tokens`
    row: NotRequired[int]  # in the file, from 0
    offset: NotRequired[int]  # of its first token
    tokens: NotRequired[int]  # number of its tokens
    reason: NotRequired[str | None]  # of a removed document


class Documents(TypedDict):
    """The output of `apertus inspect --document`."""

    name: str
    kind: str
    document: str
    documents: list[Document]


def collect(plan: Plan, node: Node, options: Options) -> Documents:
    """The result of `find_documents` for a finished part of a corpus."""
    assert options.document is not None, "inspect --document calls this"
    corpus = artifact(plan, node)
    return {
        "name": corpus.identity.name,
        "kind": "corpus",
        "document": options.document,
        "documents": find_documents(corpus, options.document),
    }


def find_documents(corpus: Artifact, wanted: str) -> list[Document]:
    """The documents with the id or URL `wanted`, or with this hash (16 hexadecimal digits) of their text as
    read: kept documents first, in the order of training, then removed ones."""
    facts = corpus.manifest.facts
    kept: list[Document] = [
        {
            "became": split,
            "file": f"{shard}.bin",
            "row": number,
            "hash": f"{row['hash']:016x}",
            "id": row["id"],
            "url": row["url"],
            "offset": row["offset"],
            "tokens": row["tokens"],
        }
        for split in ("train", "validation")
        for shard in facts[split]
        for number, row in _rows(corpus, f"{shard}.documents.parquet", wanted)
    ]
    removed: list[Document] = [
        {
            "became": row["filter"],
            "hash": f"{row['hash']:016x}",
            "id": row.get("id"),
            "url": row.get("url"),
            "reason": row.get("reason"),
        }
        for name in facts["rejects"]
        for _, row in _rows(corpus, f"{name}.parquet", wanted)
    ]
    return kept + removed


def _rows(corpus: Artifact, name: str, wanted: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """The rows of a table that belong to the wanted documents, as (row number, row)."""
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


def show(console: Console, found: Documents) -> None:
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
