"""Reading what is committed: manifests, checkpoints, units, files.

Invariant: a file is reached only through the marker that names it, and its content is checked against the digest that the marker states.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from infra.store.store import CHUNK, Store, StoreError

HASHED_BYTES = 64 * 2**20


@dataclass(frozen=True)
class Checkpoint:
    """A committed checkpoint: `folder` is its place in the store, `marker` the content of its commit marker."""

    step: int
    folder: str
    marker: dict[str, Any]

    @property
    def facts(self) -> dict[str, Any]:
        return self.marker["facts"]

    def validation_loss(self, metric: str) -> float | None:
        """`val_loss` (mean held-out loss over the sources) or `val_loss/<source>`; None when it was not measured at this very step."""
        losses: dict[str, float] = self.facts.get("validation") or {}
        if not losses or self.facts.get("validation_step") != self.step:
            return None
        return losses.get(metric.removeprefix("val_loss/")) if "/" in metric else sum(losses.values()) / len(losses)


class Artifact:
    """The folder of one fingerprint. `step` chooses the manifest of a training artifact; None is the only one of the others."""

    def __init__(self, store: Store, path: str, step: int | None = None) -> None:
        self.store = store
        self.path = path
        self.step = step

    @property
    def manifest_path(self) -> str:
        return f"{self.path}/manifest.json" if self.step is None else f"{self.path}/manifest-{self.step:08d}.json"

    @property
    def complete(self) -> bool:
        return self.store.exists(self.manifest_path)

    @cached_property
    def manifest(self) -> dict[str, Any]:
        """The committed manifest. StoreError when there is none."""
        document = self.store.read_json(self.manifest_path)
        if not isinstance(document, dict) or "files" not in document or "attempt" not in document:
            raise StoreError(
                f"'{self.manifest_path}' in the store {self.store.url} is damaged: not a manifest; delete it to have it made again"
            )
        return document

    @cached_property
    def identity(self) -> dict[str, Any]:
        """What was hashed into the fingerprint: kind, version, spec, inputs."""
        return self.store.read_json(f"{self.path}/identity.json")

    def stored_name(self, name: str) -> str:
        """Where a file of the manifest lies in the store."""
        return f"{self.path}/attempts/{self.manifest['attempt']}/{name}"

    def _record(self, name: str) -> dict[str, Any]:
        if name not in self.manifest["files"]:
            raise StoreError(f"'{self.manifest_path}' names no file '{name}'; it names {', '.join(sorted(self.manifest['files']))}")
        return self.manifest["files"][name]

    def bytes(self, name: str) -> bytes:
        """Content of a file of the manifest, checked."""
        record, data = self._record(name), self.store.read_bytes(self.stored_name(name))
        _check(self.stored_name(name), record, len(data), hashlib.sha256(data).hexdigest())
        return data

    def json(self, name: str) -> Any:
        return json.loads(self.bytes(name))

    def local(self, name: str) -> Path:
        """A local file with the checked content: the stored file itself, or a copy in the cache (`APERTUS_CACHE`, else the
        temporary folder). A stored file above `HASHED_BYTES` is checked by its size: every rank opens it and reads a small part."""
        record, stored = self._record(name), self.stored_name(name)
        if self.store.is_local:
            path = Path(self.store.full(stored))
            size = path.stat().st_size if path.exists() else 0
            sha256 = self.store.digest(stored)["sha256"] if 0 < size <= HASHED_BYTES else record["sha256"]
            _check(stored, record, size, sha256)
            return path
        cache = Path(os.environ.get("APERTUS_CACHE") or Path(tempfile.gettempdir()) / f"apertus-cache-{os.getuid()}")
        target = cache / record["sha256"] / Path(name).name
        if not (target.exists() and target.stat().st_size == record["size"]):
            target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            partial = target.with_name(f".{target.name}.{os.getpid()}")
            digest, size = hashlib.sha256(), 0
            with self.store.timed(), self.store.fs.open(self.store.full(stored), "rb") as source, open(partial, "wb") as copy:
                while chunk := source.read(CHUNK):
                    digest.update(chunk)
                    size += len(chunk)
                    copy.write(chunk)
            _check(stored, record, size, digest.hexdigest())
            os.replace(partial, target)
        return target

    def checkpoint_steps(self) -> list[int]:
        """Steps of the committed checkpoints; one listing, no marker is read."""
        names = self.store.names(f"{self.path}/checkpoints")
        return [int(name.removesuffix(".json")) for name in names if name.endswith(".json")]

    def checkpoint(self, step: int) -> Checkpoint:
        marker = self.store.read_json(f"{self.path}/checkpoints/{step:08d}.json")
        return Checkpoint(step, f"{self.path}/attempts/{marker['attempt']}/{marker['folder']}", marker)

    def withdraw(self, step: int) -> None:
        """Takes the marker of a damaged checkpoint away; what it named is then no checkpoint any more."""
        self.store.remove(f"{self.path}/checkpoints/{step:08d}.json")

    def manifest_steps(self) -> list[int]:
        """Steps at which this trajectory was brought to a committed end."""
        names = self.store.names(self.path)
        return [int(name[len("manifest-") : -len(".json")]) for name in names if name.startswith("manifest-") and name.endswith(".json")]

    def verify_checkpoint(self, checkpoint: Checkpoint) -> None:
        """Reads every file of a checkpoint and compares. StoreError names the first that differs."""
        for name, record in checkpoint.marker["files"].items():
            path = f"{checkpoint.folder}/{name}"
            try:
                found = self.store.digest(path)
            except FileNotFoundError as error:
                raise StoreError(f"'{path}' of a committed checkpoint is missing from the store {self.store.url}") from error
            _check(path, record, found["size"], found["sha256"])

    def history(self, marker: dict[str, Any] | None = None) -> Iterator[dict[str, Any]]:
        """Rows of metrics, in order, over all attempts that led to the manifest (or to the checkpoint whose marker is given)."""
        for chunk in (marker or self.manifest)["history"]:
            for line in self.store.read_bytes(f"{self.path}/attempts/{chunk}").splitlines():
                yield json.loads(line)


def _check(path: str, record: dict[str, Any], size: int, sha256: str) -> None:
    if size != record["size"] or sha256 != record["sha256"]:
        raise StoreError(
            f"'{path}' is damaged: {size} bytes with SHA-256 {sha256[:12]}..., the manifest states {record['size']} bytes with "
            f"{record['sha256'][:12]}...; remove its artifact folder to have it made again"
        )
