"""Writes what one attempt at one part makes.

Invariant: an attempt writes below its own folder only, which becomes visible when a marker (of the artifact,
a checkpoint or a unit) is written, last. So an attempt that was thought dead cannot damage anything.
"""

import contextlib
import functools
import platform
import time
from collections.abc import Iterable
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from infra.store.documents import (
    CheckpointMarker,
    Execution,
    Identity,
    InputRecord,
    Manifest,
    Seconds,
    Unit,
    check_unit,
    to_json,
)
from infra.store.files.rows import SUFFIX, encode
from infra.store.reading.artifact import Artifact, Checkpoint, local_file
from infra.store.records import (
    DamagedError,
    FileRecord,
    LocatedRecord,
    StoreError,
    inside,
    sidecar_path,
    used_path,
)
from infra.store.store import Store
from infra.store.writing.lease import require
from infra.store.writing.retention import hold
from specs.job import Job

LIBRARIES = (
    "torch",
    "torchtitan",
    "transformers",
    "datatrove",
    "tokenizers",
    "prefect",
    "fsspec",
    "numpy",
    "pydantic",
)


class Attempt:
    """One attempt, made from a `Job`. `workdir` is a local folder for files before they are put; `worker`
    names one of several processes that commit units for it, so that no two write the same path."""

    def __init__(self, job: Job, store: Store | None = None, *, worker: str = "") -> None:
        self.job = job
        self.worker = worker
        self.store = store or Store.open(job.store)
        self.artifact = Artifact(self.store, job.path)
        self.workdir = Path(job.scratch) / "work"
        self.workdir.mkdir(parents=True, exist_ok=True)
        self.files: dict[str, LocatedRecord | FileRecord] = {}
        self.history: list[LocatedRecord] = []
        self._rows: list[dict[str, Any]] = []
        self._before = Seconds(startup=0.0, compute=0.0, storage=0.0)
        self._resumed_from: list[str] = []
        self._begun = time.monotonic()
        # The two times may be from the clocks of two machines.
        self._startup = max(0.0, time.time() - job.launched_at) if job.launched_at else 0.0
        if job.resume_step is not None:
            marker = self.artifact.checkpoint(job.resume_step).marker
            self.history = marker.history
            self._before = marker.seconds
            self._resumed_from = marker.attempts

    def begin(self) -> None:
        """Records what the fingerprint stands for, before any work."""
        self.store.write_document(f"{self.job.path}/identity.json", self._identity())
        for ref in self.job.inputs.values():
            if ref.path is not None and ref.step is not None:
                hold(self.store, ref.path, ref.step, self.job.path)

    def _identity(self) -> Identity:
        return Identity(
            kind=self.job.kind,
            version=self.job.version,
            fingerprint=self.job.fingerprint,
            name=self.job.node,
            spec=self.job.identity,
            inputs={
                role: InputRecord(**ref.model_dump(exclude_none=True))
                for role, ref in self.job.inputs.items()
            },
        )

    def check_lease(self) -> None:
        """Raises LeaseLost when another attempt has taken over. Before each marker; takes one listing."""
        if self.job.lease is not None:
            require(self.store, self.job.path, self.job.lease, self.job.attempt)

    def input_artifact(self, role: str) -> Artifact:
        return Artifact.of_input(self.store, self.job.inputs[role])

    def input_checkpoint(self, role: str) -> Checkpoint:
        step = self.job.inputs[role].step
        assert step is not None, "the launcher gives the step"
        return self.input_artifact(role).checkpoint(step)

    # Files of the artifact

    def folder(self, name: str = "") -> str:
        """The path in the store of this attempt's folder, or of something in it."""
        folder = f"{self.job.path}/attempts/{self.job.attempt}"
        return f"{folder}/{inside(name, 'an attempt')}" if name else folder

    def put(self, local: Path | str, name: str) -> None:
        """Uploads a local file as file `name` of the artifact."""
        self.files[name] = self.store.upload(Path(local), self.folder(name))

    def write_bytes(self, name: str, data: bytes) -> None:
        self.files[name] = self.store.write_bytes(self.folder(name), data)

    def write_json(self, name: str, document: Any) -> None:
        self.write_bytes(name, to_json(document))

    def adopt(self, unit: Unit, names: Iterable[str]) -> None:
        """Makes files of a unit files of the artifact, under the same names, without a copy."""
        self.files |= {name: unit.files[name] for name in names}

    # Units: restartable pieces of a stage's work

    def unit(self, key: str) -> Unit | None:
        """The committed unit with a key, by any attempt, or None."""
        path = f"{self.job.path}/units/{key}.json"
        document = self.store.read_json_if_there(path)
        return None if document is None else check_unit(document, self.job.path, self.store.where(path))

    def committed_unit(self, key: str) -> Unit:
        """A unit that was committed before. StoreError when it is gone."""
        unit = self.unit(key)
        if unit is None:
            raise StoreError(f"unit {key} of {self.job.path} was committed and is gone; run the stage again")
        return unit

    def unit_files(self, key: str, unit: Unit) -> dict[str, Path]:
        """Local paths of a unit's files, or of copies, checked. DamagedError names one that differs."""
        readers = {name: self.store.reader(record.path, record) for name, record in unit.files.items()}
        try:
            return {name: local_file(file) for name, file in readers.items()}
        except DamagedError as error:
            raise DamagedError(f"{error} (unit {key})") from error

    def commit_unit(self, key: str, *, files: dict[str, Path] | None = None, data: Any = None) -> None:
        """Uploads the files of a unit, then makes it visible, unless another attempt was quicker. The unit is
        not read again: whoever waits for it may have used and removed it by then."""
        records = {}
        for name, local in (files or {}).items():
            stored = self.folder("/".join(filter(None, ("units", key, self.worker, name))))
            records[name] = _located(self.store.upload(local, stored), stored)
        self.check_lease()
        unit = Unit(attempt=self.job.attempt, data=data, files=records)
        self.store.write_document(f"{self.job.path}/units/{key}.json", unit)

    def remove_unit(self, key: str) -> None:
        """Removes a unit that others have used up: its marker, then its files."""
        if (unit := self.unit(key)) is None:
            return
        self.check_lease()
        self.store.remove(f"{self.job.path}/units/{key}.json")
        self._remove(unit.files.values())

    def remove_files(self, unit: Unit, names: Iterable[str]) -> None:
        """Removes files of a unit that others have used up, and leaves a mark for each: they are not lost."""
        records = [unit.files[name] for name in names]
        for record in records:
            self.store.overwrite(used_path(record.path), b"")
        self._remove(records)

    def _remove(self, records: Iterable[LocatedRecord]) -> None:
        for record in records:
            self.store.remove(record.path)
            if isinstance(record.pieces, str):
                self.store.remove(sidecar_path(record.path))

    # Checkpoints

    @staticmethod
    def checkpoint_folder(step: int) -> str:
        """The name, inside the attempt, of the folder that a checkpoint is written to."""
        return f"step-{step:08d}"

    def add_metrics(self, row: dict[str, Any]) -> None:
        """Adds a row to the training history; it is stored with the next checkpoint."""
        self._rows.append(row)

    def commit_checkpoint(
        self, step: int, facts: dict[str, Any], *, files: dict[str, FileRecord]
    ) -> Checkpoint:
        """Makes files in `checkpoint_folder(step)` a checkpoint. Returns the committed checkpoint, which may
        be another attempt's. `facts`: consumed tokens and samples, last losses; `files`: the records by name
        in the folder, as `Store.writer` gave them. Nothing is listed or read here."""
        if not files:
            folder = self.folder(self.checkpoint_folder(step))
            raise StoreError(f"there are no files of a checkpoint in {folder}")
        if self._rows:
            name = f"history/{step:08d}{SUFFIX}"
            record = self.store.write_bytes(self.folder(name), encode(self._rows))
            self.history = [*self.history, _located(record, f"{self.job.attempt}/{name}")]
            self._rows = []
        marker = CheckpointMarker(
            step=step,
            attempt=self.job.attempt,
            attempts=[*self._resumed_from, self.job.attempt],
            folder=self.checkpoint_folder(step),
            files=files,
            facts=facts,
            history=self.history,
            seconds=self.seconds(),
            created=_now(),
        )
        self.check_lease()
        self.store.write_document(self.artifact.marker_path(step), marker)
        return self.artifact.checkpoint(step)

    # The end

    def seconds(self) -> Seconds:
        """The start-up, compute and storage time of this part so far, over the attempts that it continues."""
        storage = self.store.seconds
        compute = max(0.0, time.monotonic() - self._begun - storage)
        return Seconds(
            startup=round(self._before.startup + self._startup, 3),
            compute=round(self._before.compute + compute, 3),
            storage=round(self._before.storage + storage, 3),
        )

    def commit(
        self, *, metrics: dict[str, Any], facts: dict[str, Any] | None = None, step: int | None = None
    ) -> None:
        """Writes the manifest, last. `step`: a training segment's end, whose checkpoint is committed."""
        end: dict[str, Any] = {"attempt": self.job.attempt, "files": self.files}
        if step is not None:
            checkpoint = self.artifact.checkpoint(step)
            marker = checkpoint.marker
            files = {f"{marker.folder}/{name}": record for name, record in marker.files.items()}
            end = {"attempt": marker.attempt, "files": files, "history": marker.history}
            end |= {"step": step, "checkpoint": checkpoint.folder}
        manifest = Manifest(
            **dict(self._identity()),
            **end,
            metrics=metrics,
            facts=facts or {},
            seconds=self.seconds(),
            execution=Execution(launch=self.job.launch.to_json(), spec=self.job.spec),
            versions=_versions(),
            created=_now(),
        )
        self.check_lease()
        self.store.write_document(Artifact(self.store, self.job.path, step).manifest_path, manifest)


def _located(record: FileRecord, path: str) -> LocatedRecord:
    return LocatedRecord(path=path, **record.model_dump(exclude_unset=True))


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


@functools.cache
def _versions() -> dict[str, str]:
    return installed_versions(LIBRARIES)


def installed_versions(packages: Iterable[str]) -> dict[str, str]:
    """The versions of Python, and of those packages that are installed; looking up nine takes 30 ms."""
    versions = {"python": platform.python_version()}
    for name in packages:
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    return versions
