"""Shows what became of the documents of a corpus, with a few kept and dropped ones, or of one document.

Invariant: reads the manifest and `examples.jsonl`, or for one document the tables of kept and of removed
documents, one row group at a time; imports neither torch nor Prefect.
"""

import re
from collections.abc import Iterator
from typing import Any, NotRequired, TypedDict

from rich.console import Console
from rich.markup import escape
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from apertus_model.data.corpora.examples import Row, from_jsonl
from flows.inspection.common import Options
from flows.languages import LanguageCounts, filters_of, languages_of
from flows.planning.graph import Node
from flows.planning.plan import Plan
from flows.stored_part import finished
from flows.terminal import empty_table
from infra.store import Artifact
from specs.errors import SpecError, did_you_mean

EXAMPLES = "examples.jsonl"
LINES = 15
_HASH = re.compile(r"[0-9a-f]{16}")
_CONTROL = re.compile(r"[^\S\n\t ]|[\x00-\x08\x0e-\x1f\x7f-\x9f]")


class AccountRow(TypedDict):
    """A line of the account from the documents read to the documents kept."""

    what: str
    documents: int
    characters: int | None  # as read; None for rejected documents, which have no text


class Kept(TypedDict):
    """The destinations of the documents that passed all filters, as in the metrics."""

    train: dict[str, int]
    validation: dict[str, int]
    probes: int
    planted: dict[str, dict[str, int]]


class Corpus(TypedDict):
    """The output of `apertus inspect` for a part of a corpus."""

    name: str
    kind: str
    account: list[AccountRow]
    languages: list[dict[str, Any]]  # `LanguageCounts.to_json` of the largest languages
    kept: Kept
    replaced: dict[str, int]  # personal data, by kind
    examples: list[Row]  # at most `--limit` of each reason


def collect(plan: Plan, node: Node, options: Options) -> Corpus:
    """The result of `account_of` for a finished part of a corpus."""
    return account_of(finished(plan, node), limit=options.limit, reason=options.reason)


def account_of(corpus: Artifact, *, limit: int, reason: str | None = None) -> Corpus:
    """What became of the documents of a corpus, with at most `limit` examples of each reason, or of `reason`
    alone: the label of a filter, `kept`, or `replaced`. SpecError for a reason that the corpus has not."""
    metrics = corpus.manifest.metrics
    reasons = [*metrics["filters"], "kept", "replaced"]
    if reason is not None and reason not in reasons:
        problem = f"there is no reason '{reason}' in this corpus"
        raise SpecError.of((), problem, did_you_mean(reason, reasons), "inspect")
    rows = from_jsonl(corpus.bytes(EXAMPLES))
    return {
        "name": corpus.identity.name,
        "kind": "corpus",
        "account": [
            {"what": what, "documents": documents, "characters": characters}
            for what, documents, characters in account(metrics)
        ],
        "languages": [language.to_json() for language in languages_of(metrics)],
        "kept": {
            "train": metrics["train"],
            "validation": metrics["validation"],
            "probes": metrics["probes"],
            "planted": metrics.get("planted", {}),
        },
        "replaced": metrics["replaced"],
        "examples": [
            row
            for name in (reasons if reason is None else [reason])
            for row in [row for row in rows if row["reason"] == name][:limit]
        ],
    }


def show(console: Console, document: Corpus) -> None:
    console.print(_account(document))
    console.print(_destination(document), highlight=False)
    if document["languages"]:
        console.print(_languages(document["languages"]))
    for row in document["examples"]:
        _print_example(console, row)


def account(metrics: dict[str, Any]) -> list[tuple[str, int, int | None]]:
    """Rows (what, documents, characters as read) from what was read to what was kept; rejected: no text."""
    amounts, dropped, characters = metrics["read"], metrics["dropped"], metrics["dropped_characters"]
    rows: list[tuple[str, int, int | None]] = [
        (f"rejected: {name}", count, None) for name, count in sorted(metrics["rejected"].items())
    ]
    rows.append(("read", amounts["documents"], amounts["characters"]))
    rows += [(f"dropped: {name}", dropped[name], characters[name]) for name in metrics["filters"]]
    kept = amounts["documents"] - sum(dropped.values()), amounts["characters"] - sum(characters.values())
    return [*rows, ("kept", *kept)]


def _account(document: Corpus) -> Table:
    counted = ("documents", "characters")
    table = empty_table(escape(document["name"]), ("", *counted), numbers=counted)
    for row in document["account"]:
        table.add_row(
            escape(row["what"]),
            f"{row['documents']:,}",
            "" if row["characters"] is None else f"{row['characters']:,}",
        )
    return table


def _languages(languages: list[dict[str, Any]]) -> Table:
    filters = filters_of(LanguageCounts(**row) for row in languages)
    counted = ("read", *filters, "kept", "tokens")
    table = empty_table("languages, documents", ("", *counted), numbers=counted)
    for row in languages:
        removed = (row["removed"][name] for name in filters)
        numbers = (row["documents"], *removed, row["kept"], row["tokens"])
        table.add_row(escape(row["language"]) or "-", *(f"{number:,}" for number in numbers))
    return table


def _destination(document: Corpus) -> str:
    replaced = ", ".join(f"{count:,} {kind}" for kind, count in document["replaced"].items())
    kept = document["kept"]
    splits = [
        f"{kept['train']['documents']:,} to train on",
        f"{kept['validation']['documents']:,} held out",
        f"{kept['probes']:,} probes",
        *(f"{planted['copies']:,} copies planted as {name}" for name, planted in kept["planted"].items()),
    ]
    return f"kept: {', '.join(splits)}; replaced: {replaced or 'nothing'}\n"


def _print_example(console: Console, row: Row) -> None:
    heading = Text(row["reason"], style="bold")
    heading.append(f"  {row['hash']}", style="dim")
    if "value" in row:
        heading.append(f"  {row['value']} (rule: {row['rule']})", style="red")
    console.print(heading)
    for label, text in (("as read", row.get("before")), ("", row["text"]), ("kept instead", row.get("like"))):
        if text is not None:
            if label:
                console.print(Padding(Text(f"{label}:", style="dim"), (0, 0, 0, 2)))
            console.print(Padding(Text(_shown(text)), (0, 0, 1, 4)))


def _shown(text: str) -> str:
    """The first lines of a text, without control characters that a terminal would obey."""
    lines = _CONTROL.sub(" ", text).split("\n")
    return "\n".join([*lines[:LINES], "[...]"] if len(lines) > LINES else lines)


# One document: `apertus inspect SPEC NAME --document ID`


class DocumentRow(TypedDict):
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


class DocumentSearch(TypedDict):
    """The output of `apertus inspect --document`."""

    name: str
    kind: str
    document: str
    documents: list[DocumentRow]


def collect_documents(plan: Plan, node: Node, options: Options) -> DocumentSearch:
    assert options.document is not None, "inspect --document calls this"
    corpus = finished(plan, node)
    return {
        "name": corpus.identity.name,
        "kind": "corpus",
        "document": options.document,
        "documents": find_documents(corpus, options.document),
    }


def find_documents(corpus: Artifact, wanted: str) -> list[DocumentRow]:
    """The documents with the id or URL `wanted`, or with this hash (16 hexadecimal digits) of their text as
    read: kept documents first, in the order of training, then removed ones."""
    facts = corpus.manifest.facts
    kept: list[DocumentRow] = [
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
    removed: list[DocumentRow] = [
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


def show_documents(console: Console, search: DocumentSearch) -> None:
    rows = search["documents"]
    if not rows:
        nothing = f"has read no document with the id, URL or hash '{escape(search['document'])}'"
        console.print(f"{escape(search['name'])} {nothing}", highlight=False, soft_wrap=True)
        return
    table = empty_table(escape(search["name"]), ("became", "hash", "id", "where or why"))
    for row in rows:
        where = row.get("reason") or f"{row['tokens']:,} tokens from {row['offset']:,} of {row['file']}"
        table.add_row(*(escape(text) for text in (row["became"], row["hash"], row["id"] or "", where)))
    console.print(table)
