"""What became of the documents of a corpus: counts, and a few kept and dropped ones with the reason.

Reads the manifest and `examples.jsonl` only; imports neither torch nor Prefect.
"""

from __future__ import annotations

import re
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from apertus_model.data.examples import Row, from_jsonl
from infra.store import Artifact, Store
from specs.errors import StageError, nearest

EXAMPLES = "examples.jsonl"
LINES = 15
_CONTROL = re.compile(r"[^\S\n\t ]|[\x00-\x08\x0e-\x1f\x7f-\x9f]")


def inspect_corpus(console: Console, store: Store, artifact: Artifact, *, limit: int = 3, reason: str | None = None) -> None:
    """Prints the account of one part of a corpus, then at most `limit` examples of each reason, or of `reason` alone: the label of a
    filter, `kept`, or `replaced`.

    Raises:
        StageError: for a reason that the corpus does not know.
    """
    metrics = artifact.manifest["metrics"]
    reasons = [*metrics["filters"], "kept", "replaced"]
    if reason is not None and reason not in reasons:
        raise StageError(f"there is no reason '{reason}' in {artifact.path} of {store.url}; {nearest(reason, reasons)}")
    console.print(_account(artifact.identity["name"], metrics))
    console.print(_destination(metrics), highlight=False)
    rows = from_jsonl(artifact.bytes(EXAMPLES))
    for name in reasons if reason is None else [reason]:
        for row in [row for row in rows if row["reason"] == name][:limit]:
            _print_example(console, row)


def account(metrics: dict[str, Any]) -> list[tuple[str, int, int | None]]:
    """(what, documents, characters) from what was read to what was kept. Characters are those of the text as read; what was rejected never
    became a text."""
    read, dropped, characters = metrics["read"], metrics["dropped"], metrics["dropped_characters"]
    rows: list[tuple[str, int, int | None]] = [(f"rejected: {name}", count, None) for name, count in sorted(metrics["rejected"].items())]
    rows.append(("read", read["documents"], read["characters"]))
    rows += [(f"dropped: {name}", dropped[name], characters[name]) for name in metrics["filters"]]
    kept = read["documents"] - sum(dropped.values()), read["characters"] - sum(characters.values())
    return [*rows, ("kept", *kept)]


def _account(name: str, metrics: dict[str, Any]) -> Table:
    table = Table(title=escape(name), title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("", no_wrap=True)
    table.add_column("documents", justify="right", no_wrap=True)
    table.add_column("characters", justify="right", no_wrap=True)
    for what, documents, characters in account(metrics):
        table.add_row(escape(what), f"{documents:,}", "" if characters is None else f"{characters:,}")
    return table


def _destination(metrics: dict[str, Any]) -> str:
    replaced = ", ".join(f"{count:,} {kind}" for kind, count in metrics["replaced"].items())
    splits = f"{metrics['train']['documents']:,} to train on, {metrics['validation']['documents']:,} held out, {metrics['probes']:,} probes"
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
    """The first lines, without what a terminal would obey."""
    lines = _CONTROL.sub(" ", text).split("\n")
    return "\n".join([*lines[:LINES], "[...]"] if len(lines) > LINES else lines)
