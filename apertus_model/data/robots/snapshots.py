"""Keeps snapshots of robots.txt on local scratch, and tells whether they exclude an address.

Invariants:
- The files are read once per machine, into one SQLite file: the first process that needs it builds it, whole
  or not at all. Exclusions are a function of the set of answers, not of their order or files.
- Memory of a worker: ROWS_AT_ONCE answers while it builds, then SQLite's cache, and the parsed rules of
  contents with at most PARSED_BYTES in all, whatever the number of hosts. Equal contents are stored and
  parsed once. Disk: about 100 bytes per answer and the distinct contents, compressed.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import sqlite3
import zlib
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from apertus_model.data.documents.addresses import PORTS, Address
from apertus_model.data.robots.answers import RobotsAnswer, answers
from apertus_model.data.robots.rules import ERRORS, UNREACHED, Exclusion, Rules
from infra.store.inputs import SourceError
from specs.robots import RobotsFilter, RobotsSource

PARSED_BYTES = 2**22
OVERHEAD = 2**10  # bytes of the parsed rules of a short content
ROWS_AT_ONCE = 1000
_SCHEMA = """
PRAGMA journal_mode = OFF;
PRAGMA synchronous = OFF;
CREATE TABLE answers (origin TEXT, error INTEGER, date INTEGER, content BLOB);
CREATE TABLE contents (digest BLOB PRIMARY KEY, content BLOB) WITHOUT ROWID;
"""


class StoredAnswer(NamedTuple):
    error: bool
    date: int
    digest: bytes | None  # of its content


class AnswerIndex:
    """All answers of some snapshots, by origin."""

    def __init__(self, path: Path) -> None:
        self._database = sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro&immutable=1", uri=True)

    @classmethod
    def build(cls, sources: Sequence[RobotsSource], path: Path) -> AnswerIndex:
        """Builds the index unless it exists, and opens it. SourceError when a file cannot be read, or there
        is no answer."""
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path.with_suffix(".lock"), "wb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not path.exists():
                partial = path.with_suffix(".partial")
                partial.unlink(missing_ok=True)
                _write(sources, partial)
                os.replace(partial, path)
        return cls(path)

    def answers(self, origin: str) -> list[StoredAnswer]:
        rows = self._database.execute("SELECT error, date, content FROM answers WHERE origin = ?", (origin,))
        return [StoredAnswer(bool(error), date, digest) for error, date, digest in rows]

    def content(self, digest: bytes) -> bytes:
        (content,) = self._database.execute(
            "SELECT content FROM contents WHERE digest = ?", (digest,)
        ).fetchone()
        return zlib.decompress(content)


def _write(sources: Sequence[RobotsSource], path: Path) -> None:
    database = sqlite3.connect(path)
    try:
        database.executescript(_SCHEMA)
        every_answer = (answer for source in sources for answer in answers(source))
        while rows := list(islice(every_answer, ROWS_AT_ONCE)):
            _add(database, rows)
        if database.execute("SELECT 1 FROM answers LIMIT 1").fetchone() is None:
            raise SourceError(
                f"there is no answer to a request for robots.txt in {', '.join(s.url for s in sources)}. Fix:"
                " correct the files of `snapshots`"
            )
        database.execute("CREATE INDEX by_origin ON answers (origin)")
        database.commit()
    finally:
        database.close()


def _add(database: sqlite3.Connection, rows: Sequence[RobotsAnswer]) -> None:
    digests = [
        None if row.content is None else hashlib.blake2b(row.content, digest_size=16).digest() for row in rows
    ]
    database.executemany(
        "INSERT OR IGNORE INTO contents VALUES (?, ?)",
        (
            (digest, zlib.compress(row.content))
            for digest, row in zip(digests, rows, strict=True)
            if row.content is not None
        ),
    )
    database.executemany(
        "INSERT INTO answers VALUES (?, ?, ?, ?)",
        ((row.origin, row.error, row.date, digest) for digest, row in zip(digests, rows, strict=True)),
    )


class SnapshotRobots:
    """The exclusions that snapshots imply for the agents and by the policies of a filter."""

    def __init__(self, index: AnswerIndex, spec: RobotsFilter) -> None:
        self._index = index
        self._spec = spec
        self._agents = [agent.strip() for agent in spec.agents]
        self._parsed: OrderedDict[bytes, tuple[int, Rules]] = OrderedDict()
        self._size = 0

    def excluded(self, address: Address) -> Exclusion | None:
        """Why an address is excluded, or None."""
        failed = False
        for origin in _origins(address, self._spec.scope):
            stored = self._index.answers(origin)
            if answered := [answer for answer in stored if not answer.error]:
                return self._judged(address, origin, answered)
            failed |= bool(stored)
        if failed and self._spec.errors == "drop":
            return Exclusion(address.host, (ERRORS,), "robots.txt answers without an error")
        if not failed and self._spec.unreached == "drop":
            return Exclusion(address.host, (UNREACHED,), "a snapshot of robots.txt")
        return None

    def _judged(self, address: Address, origin: str, answered: Sequence[StoredAnswer]) -> Exclusion | None:
        latest = max(answer.date for answer in answered)
        counted = [answer for answer in answered if self._spec.several == "any" or answer.date == latest]
        digests = {answer.digest for answer in counted if answer.digest is not None}
        closed = {agent for digest in digests for agent in self._rules(digest).excluded(address.path)}
        if not closed:
            return None
        agents = tuple(agent for agent in dict.fromkeys(self._agents) if agent in closed)
        return Exclusion(address.host, agents, f"open to all agents in {origin}/robots.txt")

    def _rules(self, digest: bytes) -> Rules:
        """The rules of a content; the least recently used ones are forgotten first."""
        if digest in self._parsed:
            self._parsed.move_to_end(digest)
            return self._parsed[digest][1]
        content = self._index.content(digest)
        rules = Rules(content, self._agents)
        size = len(content) + OVERHEAD
        self._parsed[digest] = size, rules
        self._size += size
        while self._size > PARSED_BYTES:
            _, (size, _) = self._parsed.popitem(last=False)
            self._size -= size
        return rules


def _origins(address: Address, scope: str) -> Iterator[str]:
    """The origins whose robots.txt may bind an address, in order: the first that has an answer does."""
    yield address.origin
    if scope == "origin" or address.port is not None or address.scheme not in PORTS:
        return
    schemes = sorted(PORTS, key=lambda scheme: scheme != address.scheme)
    other = address.host.removeprefix("www.") if address.host.startswith("www.") else f"www.{address.host}"
    yield address._replace(scheme=schemes[1]).origin
    yield from (address._replace(scheme=scheme, host=other).origin for scheme in schemes)


@lru_cache(maxsize=4)
def load_snapshots(spec: str, scratch: Path) -> SnapshotRobots:
    """Opens the index of a filter, as JSON, once per process. SourceError when a snapshot cannot be read."""
    parsed = RobotsFilter.model_validate_json(spec)
    sources = json.dumps([source.to_json() for source in parsed.snapshots], sort_keys=True)
    name = f"robots-{hashlib.sha256(sources.encode()).hexdigest()[:16]}.sqlite"
    return SnapshotRobots(AnswerIndex.build(parsed.snapshots, scratch / name), parsed)
