"""Shows what became of the documents of a corpus: counts, and a few kept and dropped ones with the reason.

Invariant: reads the manifest and `examples.jsonl` only; imports neither torch nor Prefect.
"""

from __future__ import annotations

import re
from typing import Any, TypedDict

from rich.console import Console
from rich.markup import escape
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from apertus_model.data.corpora.examples import Row, from_jsonl
from flows.inspection.common import Options, artifact
from flows.languages import Language, filters_of, languages_of
from flows.planning.graph import Node
from flows.planning.plan import Plan
from flows.terminal import empty_table
from infra.store import Artifact
from specs.errors import SpecError, did_you_mean

EXAMPLES = "examples.jsonl"
LINES = 15
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
    languages: list[dict[str, Any]]  # `Language.to_json` of the largest languages
    kept: Kept
    replaced: dict[str, int]  # personal data, by kind
    examples: list[Row]  # at most `--limit` of each reason


def collect(plan: Plan, node: Node, options: Options) -> Corpus:
    """The result of `account_of` for a finished part of a corpus."""
    return account_of(artifact(plan, node), limit=options.limit, reason=options.reason)


def account_of(corpus: Artifact, *, limit: int, reason: str | None = None) -> Corpus:
    """What became of the documents of a corpus, with at most `limit` examples of each reason, or of `reason`
    alone: the label of a filter, `kept`, or `replaced`.

    Raises:
        SpecError: for a reason that the corpus does not know.
    """
    metrics = corpus.manifest.metrics
    reasons = [*metrics["filters"], "kept", "replaced"]
    if reason is not None and reason not in reasons:
        raise SpecError.of(
            (), f"there is no reason '{reason}' in this corpus", did_you_mean(reason, reasons), "inspect"
        )
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


def show(console: Console, found: Corpus) -> None:
    """Prints what `account_of` has found."""
    console.print(_account(found))
    console.print(_destination(found), highlight=False)
    if found["languages"]:
        console.print(_languages(found["languages"]))
    for row in found["examples"]:
        _print_example(console, row)


def account(metrics: dict[str, Any]) -> list[tuple[str, int, int | None]]:
    """Rows (what, documents, characters) from the documents read to the documents kept. Characters are those
    of the text as read; rejected documents have no text."""
    read, dropped, characters = metrics["read"], metrics["dropped"], metrics["dropped_characters"]
    rows: list[tuple[str, int, int | None]] = [
        (f"rejected: {name}", count, None) for name, count in sorted(metrics["rejected"].items())
    ]
    rows.append(("read", read["documents"], read["characters"]))
    rows += [(f"dropped: {name}", dropped[name], characters[name]) for name in metrics["filters"]]
    kept = read["documents"] - sum(dropped.values()), read["characters"] - sum(characters.values())
    return [*rows, ("kept", *kept)]


def _account(found: Corpus) -> Table:
    counted = ("documents", "characters")
    table = empty_table(escape(found["name"]), ("", *counted), numbers=counted)
    for row in found["account"]:
        table.add_row(
            escape(row["what"]),
            f"{row['documents']:,}",
            "" if row["characters"] is None else f"{row['characters']:,}",
        )
    return table


def _languages(languages: list[dict[str, Any]]) -> Table:
    filters = filters_of(Language(**row) for row in languages)
    counted = ("read", *filters, "kept", "tokens")
    table = empty_table("languages, documents", ("", *counted), numbers=counted)
    for row in languages:
        removed = (row["removed"][name] for name in filters)
        numbers = (row["documents"], *removed, row["kept"], row["tokens"])
        table.add_row(escape(row["language"]) or "-", *(f"{number:,}" for number in numbers))
    return table


def _destination(found: Corpus) -> str:
    replaced = ", ".join(f"{count:,} {kind}" for kind, count in found["replaced"].items())
    kept = found["kept"]
    splits = (
        f"{kept['train']['documents']:,} to train on, {kept['validation']['documents']:,} held out,"
        f" {kept['probes']:,} probes"
    )
    splits += "".join(
        f", {made['copies']:,} copies planted as {name}" for name, made in kept["planted"].items()
    )
    return f"kept: {splits}; replaced: {replaced or 'nothing'}\n"


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
