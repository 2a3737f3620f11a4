"""Attempts that end early, or note what they commit; what an artifact holds; and the workers of a process."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

from infra.store import Artifact, Attempt
from infra.store.documents import Unit
from specs.job import Job


class Interrupted(Exception):
    pass


class StopsAfterOneUnit(Attempt):
    """A stage that dies when it has seen its first committed unit, whoever committed it."""

    LAST: ClassVar[int] = 1

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self.seen: set[str] = set()

    def commit_unit(self, key: str, **more: Any) -> None:
        super().commit_unit(key, **more)
        self.committed_unit(key)

    def committed_unit(self, key: str) -> Unit:
        unit = super().committed_unit(key)
        self.seen.add(key)
        if len(self.seen) == self.LAST:
            raise Interrupted
        return unit


def units_of(bench: Any, path: str, attempt: str) -> list[str]:
    """The keys of the units of an artifact that an attempt has committed."""
    found = {
        name: bench.store.read_json(f"{path}/units/{name}") for name in bench.store.names(f"{path}/units")
    }
    return sorted(name.removesuffix(".json") for name, unit in found.items() if unit["attempt"] == attempt)


def stored_bytes(artifact: Artifact) -> dict[str, bytes]:
    """The content of every file, by name."""
    return {name: artifact.bytes(name) for name in sorted(artifact.manifest.files)}


def workers() -> Iterator[Path]:
    """The folders in /proc of all workers that stages have on this machine."""
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended
            if b"apertus_model.work.worker" in (folder / "cmdline").read_bytes():
                yield folder


def children(pid: int) -> list[int]:
    """Workers that a process has started."""
    found = []
    for folder in workers():
        with contextlib.suppress(OSError, IndexError):  # it has ended
            if int((folder / "stat").read_text().rpartition(")")[2].split()[1]) == pid:
                found.append(int(folder.name))
    return found
