"""Artifacts that tests commit by hand, of every kind that a store treats in a way of its own."""

from __future__ import annotations

import uuid
from pathlib import Path
from typing import Any

from infra.store import Attempt, Store
from infra.store.documents import to_json
from infra.store.reading.walk import list_files, open_contents
from specs.job import InputRef
from tests.infra.sealed import sealed
from tests.jobs import input_at, job_at

WEB = {"documents": InputRef(kind="external", fingerprint="d1", name="web")}


class Maker:
    """Commits artifacts: `data("corpus", "a", (path, step), ...)`, made from what lies there, gives the
    place of a finished one."""

    def __init__(self, store: Store, scratch: Path) -> None:
        self.store = store
        self.scratch = scratch

    def attempt(
        self, kind: str, letter: str, *reads: tuple[str, int | None], name: str = "first", **fields: Any
    ) -> Attempt:
        fields["inputs"] = {
            f"input:{index}": input_at(path, step) for index, (path, step) in enumerate(reads)
        } | fields.get("inputs", {})
        fields = {"node": f"{kind}-{letter}", "identity": {"letter": letter}} | fields
        path = f"{kind}/{letter * 32}"
        # attempts of one name at one place have folders of their own
        job = job_at(path, self.store, self.scratch / uuid.uuid4().hex, name, **fields)
        attempt = Attempt(job, self.store)
        attempt.begin()
        return attempt

    def data(self, kind: str, letter: str, *reads: tuple[str, int | None], **fields: Any) -> str:
        attempt = self.attempt(kind, letter, *reads, **fields)
        attempt.write_bytes("data.bin", letter.encode() * 1000)
        attempt.commit(metrics={})
        return attempt.job.path

    def training(self, letter: str, steps: list[int], ends: list[int], *reads: tuple[str, int | None]) -> str:
        attempt = self.attempt("pretrain", letter, *reads)
        for step in steps:
            attempt.add_metrics({"step": step, "loss": 1.0})
            self.store.write_once(
                f"{attempt.folder(Attempt.checkpoint_folder(step))}/shard", f"{letter}{step}".encode() * 100
            )
            attempt.commit_checkpoint(step, {}, files=sealed(attempt, step))
            if step in ends:
                attempt.commit(metrics={}, step=step)
        return attempt.job.path

    def run(
        self, name: str, stamp: str = "20200101T000000.000000Z-1", /, **parts: tuple[str, int | None]
    ) -> None:
        document = {
            "parts": {part: {"path": path, "step": step} for part, (path, step) in parts.items()},
            "spec": {},
        }
        self.store.write_once(f"runs/{name}/{stamp}.json", to_json(document))


class Stopped(Exception):
    pass


def sound(store: Store) -> None:
    """Every file that a marker names is there, of its size."""
    listing = list_files(store)
    for path in {
        "/".join(name.split("/")[:2])
        for name in listing
        if name.startswith(("pretrain/", "export/", "corpus/", "mixture/"))
    }:
        for marker in open_contents(store, path).markers:
            for name, record in marker.all_files.items():
                assert name in listing, f"{marker.path} names {name}"
                assert record.size == listing[name].size
