"""A few kept and dropped documents of a corpus, for people to read: `examples.jsonl`.

Invariant: only the hashes of documents decide which are shown. Each task offers, for each reason, the
`CANDIDATES` documents with the smallest hashes, so the smallest of all tasks are among them, however the
tasks are divided; when deduplication drops some of them, fewer are shown.

A row has these fields:

    reason          the label of a step; `kept`; or `replaced`, for kept documents with replaced personal data
    hash, text      of the document
    value, rule     for dropped documents: what was measured, and what is required
    like            for duplicates: the text that was kept
    before          for `replaced`: the text before the replacement

Texts are cut to `CHARACTERS`. Dropped text and replaced personal data appear here unchanged.
"""

import json
from collections.abc import Callable, Iterable
from typing import Any

CANDIDATES = 8
SHOWN = 3
CHARACTERS = 2000
BEFORE_CHANGE = 200

Row = dict[str, Any]
Key = tuple[int, int]  # hash of the text, hash of the columns


def mixed(hash_: int) -> int:
    """A content hash with reversed bytes. Documents with small values of the hash itself are held out."""
    return int.from_bytes(hash_.to_bytes(8, "little"), "big")


class Examples:
    """The `CANDIDATES` documents with the smallest hashes for each reason; none unless `wanted`."""

    def __init__(self, *, wanted: bool = True) -> None:
        self.wanted = wanted
        self._rows: dict[str, dict[Key, Row]] = {}  # by reason

    def offer(self, reason: str, key: Key, row: Callable[[], Row]) -> None:
        """Adds a new document if it is among the smallest; `row` is called only then."""
        if not self.wanted:
            return
        some = self._rows.setdefault(reason, {})
        if key in some or (len(some) == CANDIDATES and _place(key) > max(map(_place, some))):
            return
        some[key] = {"reason": reason, "hash": f"{key[0]:016x}", "columns": f"{key[1]:016x}", **row()}
        if len(some) > CANDIDATES:
            del some[max(some, key=_place)]

    def rows(self) -> list[Row]:
        """All candidates, by reason, smallest first."""
        return _ordered(self._rows)


def joined(rows: Iterable[Row]) -> list[Row]:
    """The `CANDIDATES` smallest rows of each reason; of equal rows the first, `alive` if one of them is."""
    by_reason: dict[str, dict[Key, Row]] = {}
    for row in rows:
        some = by_reason.setdefault(row["reason"], {})
        before = some.setdefault((int(row["hash"], 16), int(row["columns"], 16)), row)
        before["alive"] = before["alive"] or row["alive"]
        if len(some) > CANDIDATES:
            del some[max(some, key=_place)]
    return _ordered(by_reason)


def choose(rows: Iterable[Row], reasons: list[str]) -> list[Row]:
    """At most `SHOWN` candidates that are alive for each of the `reasons`, in their order."""
    candidates = joined(rows)
    chosen: list[Row] = []
    for reason in reasons:
        alive = [row for row in candidates if row["reason"] == reason and row["alive"]]
        chosen += [
            {name: value for name, value in row.items() if name not in ("columns", "alive")}
            for row in alive[:SHOWN]
        ]
    return chosen


def _place(key: Key) -> Key:
    return mixed(key[0]), key[1]


def _ordered(by_reason: dict[str, dict[Key, Row]]) -> list[Row]:
    return [some[key] for _, some in sorted(by_reason.items()) for key in sorted(some, key=_place)]


def cut(text: str) -> str:
    """The beginning of a text."""
    return text[:CHARACTERS]


def cut_at_change(before: str, after: str) -> Row:
    """Both texts, from shortly before the first difference."""
    change = next(
        (i for i, (character, other) in enumerate(zip(before, after, strict=False)) if character != other), 0
    )
    start = max(0, change - BEFORE_CHANGE)
    return {"text": after[start : start + CHARACTERS], "before": before[start : start + CHARACTERS]}


def to_jsonl(rows: list[Row]) -> bytes:
    """The rows as JSON, one per line, with sorted keys."""
    return "".join(json.dumps(row, ensure_ascii=False, sort_keys=True) + "\n" for row in rows).encode()


def from_jsonl(data: bytes) -> list[Row]:
    return [json.loads(line) for line in data.decode().split("\n") if line]
