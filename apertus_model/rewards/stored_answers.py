"""The answers of a judge that are in the store, by their keys.

Answers are in the rows of parts that asked a judge, and in the units of such parts that are not finished. The
answers of parts that asked the same model are read once, into a database on this machine, since there can be
many millions of them.

Invariant: an answer is found only under its key. An answer that cannot be read counts as not known.
"""

import json
import sqlite3
from collections.abc import Iterator
from pathlib import Path

from apertus_model.data.rows import Row, Rows
from infra.store import Artifact, Store, StoreError
from infra.store.documents import check_unit
from infra.store.reading.artifact import local_file

KINDS = ("rewards", "evaluate_reward")  # kinds of parts that ask a judge


class StoredAnswers:
    """Answers by key, as they were in the store when this object was made."""

    def __init__(self, store: Store, folder: Path, model: str | None) -> None:
        """`folder`: for the database; `model`: fingerprint of the judge's, or None for one on a server."""
        self._model = model
        self._database = sqlite3.connect(folder / "answers.sqlite", isolation_level=None)
        self._database.execute("PRAGMA journal_mode = OFF")
        self._database.execute(
            "CREATE TABLE IF NOT EXISTS answers (key TEXT PRIMARY KEY, probabilities TEXT)"
        )
        self._database.execute("BEGIN")
        for kind in KINDS:
            for name in store.names(kind):
                self._read(Artifact(store, f"{kind}/{name}"))
        self._database.execute("COMMIT")

    def get(self, key: str) -> tuple[float, ...] | None:
        """The probabilities of an answer; None for an unknown key."""
        row = self._database.execute("SELECT probabilities FROM answers WHERE key = ?", (key,)).fetchone()
        return tuple(json.loads(row[0])) if row is not None else None

    def _read(self, artifact: Artifact) -> None:
        identity = artifact.readable_identity
        if identity is None or not (identity.spec.get("reward") or {}).get("judge"):
            return
        asked = identity.inputs.get("judge")
        if (asked.fingerprint if asked is not None else None) != self._model:
            return
        try:
            for row in _rows(artifact):
                answers = row.get("answers", ())
                values = [(answer["key"], json.dumps(answer["probabilities"])) for answer in answers]
                self._database.executemany("INSERT OR IGNORE INTO answers VALUES (?, ?)", values)
        except (StoreError, OSError, ValueError, KeyError, TypeError):
            return  # a part that was removed or damaged meanwhile


def _rows(artifact: Artifact) -> Iterator[Row]:
    if artifact.complete:
        yield from Rows(artifact)
        return
    store, folder = artifact.store, f"{artifact.path}/units"
    for name in store.names(folder):
        path = f"{folder}/{name}"
        record = check_unit(store.read_json(path), artifact.path, path).files["rows.jsonl"]
        with open(local_file(store.reader(record.path, record)), "rb") as file:
            for line in file:
                yield json.loads(line)
