"""Writing: one attempt at one part.

Invariant: an attempt writes below its own folder only; what it wrote becomes visible when a marker (`manifest.json`, a checkpoint's, a
unit's) is written, after every file that the marker names. So an attempt that was thought dead cannot damage anything.
"""

from __future__ import annotations

import json
import platform
import time
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from infra.store.artifact import Artifact, Checkpoint
from infra.store.retention import refer
from infra.store.store import Store, StoreError, to_json
from specs.job import Job

LIBRARIES = ("torch", "torchtitan", "transformers", "datatrove", "tokenizers", "prefect", "fsspec", "numpy", "pydantic")


class Attempt:
    """One attempt, made from a `Job`. `workdir` is a local folder for files before they are put."""

    def __init__(self, job: Job, store: Store | None = None) -> None:
        self.job = job
        self.store = store or Store.open(job.store)
        self.artifact = Artifact(self.store, job.path)
        self.workdir = Path(job.scratch) / "work"
        self.workdir.mkdir(parents=True, exist_ok=True)
        self.files: dict[str, dict[str, Any]] = {}
        self.history: list[str] = []
        self._rows: list[dict[str, Any]] = []
        self._before = {"startup": 0.0, "compute": 0.0, "storage": 0.0}
        self._resumed_from: list[str] = []
        self._begun = time.time()
        self._startup = self._begun - job.launched_at if job.launched_at else 0.0
        if job.resume_step is not None:
            marker = self.artifact.checkpoint(job.resume_step).marker
            self.history = list(marker["history"])
            self._before = dict(marker["seconds"])
            self._resumed_from = [*marker["attempts"]]

    def begin(self) -> None:
        """Records what the fingerprint stands for, before any work."""
        self.store.write_once(f"{self.job.path}/identity.json", to_json(self._identity()))
        for read in self.job.inputs.values():
            if read.path is not None and read.step is not None:
                refer(self.store, read.path, read.step, self.job.path)

    def _identity(self) -> dict[str, Any]:
        return {
            "kind": self.job.kind,
            "version": self.job.version,
            "fingerprint": self.job.fingerprint,
            "name": self.job.node,
            "spec": self.job.identity,
            "inputs": {role: ref.model_dump(exclude_none=True) for role, ref in self.job.inputs.items()},
        }

    # Files of the artifact

    def folder(self, name: str = "") -> str:
        """Path in the store of this attempt's folder, or of something in it."""
        return f"{self.job.path}/attempts/{self.job.attempt}" + (f"/{name}" if name else "")

    def location(self, name: str) -> str:
        """The same as a local path or URL, for libraries that write by themselves."""
        return self.store.location(self.folder(name))

    def put(self, local: Path | str, name: str) -> None:
        """Uploads a local file as file `name` of the artifact."""
        self.files[name] = self.store.upload(Path(local), self.folder(name))

    def write_bytes(self, name: str, data: bytes) -> None:
        chunks = iter((data, b""))
        self.files[name] = self.store.write_stream(self.folder(name), lambda: next(chunks))

    def write_json(self, name: str, document: Any) -> None:
        self.write_bytes(name, to_json(document))

    # Units: restartable pieces of a stage's work

    def unit(self, key: str) -> dict[str, Any] | None:
        """The committed unit of that key, by whichever attempt: `{"data", "files": {name: {size, sha256, path}}}`, or None."""
        path = f"{self.job.path}/units/{key}.json"
        return self.store.read_json(path) if self.store.exists(path) else None

    def commit_unit(self, key: str, *, files: dict[str, Path] | None = None, data: Any = None) -> dict[str, Any]:
        """Uploads the files of a unit, then makes it visible. The unit as committed, which may be another attempt's."""
        records = {}
        for name, local in (files or {}).items():
            stored = self.folder(f"units/{key}/{name}")
            records[name] = {**self.store.upload(local, stored), "path": stored}
        self.store.write_once(f"{self.job.path}/units/{key}.json", to_json({"attempt": self.job.attempt, "data": data, "files": records}))
        committed = self.unit(key)
        if committed is None:
            raise StoreError(f"unit {key} of {self.job.path} was committed and is gone")
        return committed

    # Checkpoints

    @staticmethod
    def checkpoint_folder(step: int) -> str:
        """Name, inside the attempt, of the folder that a checkpoint is written to."""
        return f"step-{step:08d}"

    def add_metrics(self, row: dict[str, Any]) -> None:
        """A row of the training history; kept with the next checkpoint."""
        self._rows.append(row)

    def commit_checkpoint(self, step: int, facts: dict[str, Any], files: dict[str, dict[str, Any]] | None = None) -> Checkpoint:
        """Makes the files that lie in `checkpoint_folder(step)` a checkpoint. `facts`: consumed tokens and samples, last losses. `files`:
        their records by name, as `Store.writer` gave them; None reads what lies there."""
        folder = self.folder(self.checkpoint_folder(step))
        root = self.store.full(folder)
        if files is None:
            names = sorted(str(path)[len(root) :].lstrip("/") for path in self.store.fs.find(root))
            files = {name: self.store.digest(f"{folder}/{name}") for name in names}
        if not files:
            raise StoreError(f"there are no files of a checkpoint in {folder}")
        records = files
        self._flush_history(step)
        marker = {
            "step": step,
            "attempt": self.job.attempt,
            "attempts": [*self._resumed_from, self.job.attempt],
            "folder": self.checkpoint_folder(step),
            "files": records,
            "facts": facts,
            "history": self.history,
            "seconds": self.seconds(),
            "created": _now(),
        }
        self.store.write_once(f"{self.job.path}/checkpoints/{step:08d}.json", to_json(marker))
        return self.artifact.checkpoint(step)

    def _flush_history(self, step: int) -> None:
        if not self._rows:
            return
        name = f"history/{step:08d}.jsonl"
        text = "".join(json.dumps(row, sort_keys=True) + "\n" for row in self._rows)
        chunks = iter((text.encode(), b""))
        self.store.write_stream(self.folder(name), lambda: next(chunks))
        self.history = [*self.history, f"{self.job.attempt}/{name}"]
        self._rows = []

    # The end

    def seconds(self) -> dict[str, float]:
        """Start-up, compute and storage time of this part so far, over the attempts that it continues."""
        storage = self.store.seconds
        compute = max(0.0, time.time() - self._begun - storage)
        parts = {"startup": self._startup, "compute": compute, "storage": storage}
        return {name: round(self._before[name] + value, 3) for name, value in parts.items()}

    def commit(self, *, metrics: dict[str, Any], facts: dict[str, Any] | None = None, step: int | None = None) -> None:
        """Writes the manifest, last of all. `step`: the end of a training segment, whose checkpoint is committed already."""
        manifest: dict[str, Any] = self._identity() | {
            "attempt": self.job.attempt,
            "files": self.files,
            "metrics": metrics,
            "facts": facts or {},
            "seconds": self.seconds(),
            "execution": {"launch": self.job.launch, "spec": self.job.spec},
            "versions": _versions(),
            "created": _now(),
        }
        if step is not None:
            checkpoint = self.artifact.checkpoint(step)
            folder = checkpoint.marker["folder"]
            manifest |= {
                "step": step,
                "attempt": checkpoint.marker["attempt"],
                "checkpoint": checkpoint.folder,
                "files": {f"{folder}/{name}": record for name, record in checkpoint.marker["files"].items()},
                "history": checkpoint.marker["history"],
            }
        self.store.write_once(Artifact(self.store, self.job.path, step).manifest_path, to_json(manifest))


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def _versions() -> dict[str, str]:
    versions = {"python": platform.python_version()}
    for name in LIBRARIES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions
