"""Reads what is committed: manifests, checkpoints, units, files.

Invariant: a file is reached only through the marker that names it, and its content is checked against the
digests that the marker states. What a marker says is itself checked before it is used: no name in it leads
out of the artifact's attempts.
"""

from __future__ import annotations

import hashlib
import os
import re
import stat
import tempfile
import uuid
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Any

from infra.store.documents import CheckpointMarker, Identity, Manifest, check_step
from infra.store.files.reader import FETCHES, CheckedFile
from infra.store.files.rows import decode
from infra.store.records import DamagedCheckpoint, DamagedError, FileRecord, StoreError
from infra.store.store import Store
from specs.foreign import ForeignError, M, checked, parse_json, shown
from specs.job import InputRef


@dataclass(frozen=True)
class Checkpoint:
    """A committed checkpoint: its folder in the store, and the content of its commit marker."""

    artifact: Artifact
    step: int
    folder: str
    marker: CheckpointMarker

    @property
    def facts(self) -> dict[str, Any]:
        return self.marker.facts

    @property
    def files(self) -> dict[str, FileRecord]:
        """The records of the files, by name in the folder."""
        return self.marker.files

    @property
    def name(self) -> str:
        """The checkpoint's name in messages."""
        return f"checkpoint {self.step} of {self.artifact.path} in the store {self.artifact.store.url}"

    def open(self, name: str) -> CheckedFile:
        """A file of the checkpoint, to be read in parts, and checked."""
        if name not in self.files:
            raise DamagedError(f"{self.name} has no file '{name}'; it has {', '.join(sorted(self.files))}")
        return self.artifact.store.reader(f"{self.folder}/{name}", self.files[name])

    def damaged(self, error: DamagedError) -> DamagedCheckpoint:
        """The error about a file, as an error about the checkpoint."""
        return DamagedCheckpoint(str(error), self.artifact.path, self.step)

    def check(self, *, content: bool = True) -> None:
        """Checks that every file is there with its length; with `content`, also reads and compares all of it.
        Checks several files at a time. DamagedCheckpoint names the first that differs."""
        with ThreadPoolExecutor(FETCHES, "check") as pool:
            files = map(self.open, self.files)
            checks = [pool.submit(file.check if content else file.check_size) for file in files]
            try:
                for check in checks:
                    check.result()
            except DamagedError as error:
                raise self.damaged(error) from error
            finally:
                for check in checks:
                    check.cancel()

    def validation_loss(self, metric: str) -> float | None:
        """The metric `val_loss` (mean held-out loss over the sources) or `val_loss/<source>`; None for any
        other metric, and when it was not measured at this very step."""
        losses: dict[str, float] = self.facts.get("validation") or {}
        if not losses or self.facts.get("validation_step") != self.step:
            return None
        if metric == "val_loss":
            return sum(losses.values()) / len(losses)
        return losses.get(metric.removeprefix("val_loss/")) if metric.startswith("val_loss/") else None


class Artifact:
    """The folder of one fingerprint. `step` chooses a training artifact's manifest; else None."""

    def __init__(self, store: Store, path: str, step: int | None = None) -> None:
        self.store = store
        self.path = path
        self.step = step

    @classmethod
    def of_input(cls, store: Store, ref: InputRef) -> Artifact:
        """The artifact that an input of a job names."""
        assert ref.path is not None, "the launcher gives the place"
        return cls(store, ref.path)

    @property
    def manifest_path(self) -> str:
        if self.step is None:
            return f"{self.path}/manifest.json"
        return f"{self.path}/manifest-{self.step:08d}.json"

    @property
    def complete(self) -> bool:
        return self.store.exists(self.manifest_path)

    @cached_property
    def manifest(self) -> Manifest:
        """The committed manifest. StoreError when it is missing, or is not a manifest."""
        return self._manifest(self.store.read_json(self.manifest_path))

    def manifest_if_complete(self) -> Manifest | None:
        """The manifest, or None when it is missing, in one request. StoreError when it is not a manifest."""
        document = self.store.read_json_if_there(self.manifest_path)
        return None if document is None else self._manifest(document)

    def _manifest(self, document: Any) -> Manifest:
        return check_step(Manifest, document, self.step, self.store.where(self.manifest_path))

    @cached_property
    def identity(self) -> Identity:
        """The content that was hashed into the fingerprint. StoreError when it cannot be read."""
        return self.store.document(f"{self.path}/identity.json", Identity)

    @property
    def readable_identity(self) -> Identity | None:
        """The identity; None when it cannot be read."""
        try:
            return self.identity
        except StoreError:
            return None

    def metric(self, *path: str) -> float:
        """A number among the manifest's metrics. DamagedError names a metric that is no number."""
        value: Any = self.manifest.metrics
        for name in path:
            value = value.get(name) if isinstance(value, dict) else None
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            problem = f"metrics.{'.'.join(path)} is {shown(value)}, not a number"
            raise self.store.damaged(self.manifest_path, problem)
        return value

    def stored_name(self, name: str) -> str:
        """The place of a file of the manifest in the store."""
        return self.manifest.place(self.path, name)

    def open(self, name: str) -> CheckedFile:
        """A file of the manifest, to be read in parts or as a stream, and checked."""
        files = self.manifest.files
        if name not in files:
            named = ", ".join(sorted(files))
            raise StoreError(f"'{self.manifest_path}' names no file '{name}'; it names {named}")
        return self.store.reader(self.stored_name(name), files[name])

    def bytes(self, name: str) -> bytes:
        """The checked content of a file of the manifest."""
        return self.open(name).bytes()

    def json(self, name: str) -> Any:
        """The content of a JSON file of the manifest. DamagedError when it is not JSON."""
        with self._naming(name):
            return parse_json(self.bytes(name))

    def document(self, name: str, model: type[M]) -> M:
        """A JSON file of the manifest as its model. DamagedError when it does not fit the model."""
        with self._naming(name):
            return checked(model, self.json(name))

    @contextmanager
    def _naming(self, name: str) -> Iterator[None]:
        """Turns an error about the content of a file into a DamagedError with the place of the file."""
        try:
            yield
        except ForeignError as error:
            where = self.store.where(self.stored_name(name))
            raise DamagedError(f"{where} is damaged: {error}") from error

    def local(self, name: str) -> Path:
        """A local file with the checked content: the stored file itself, or a copy in the cache. All of it is
        compared with its digests, once per process; use `open` for parts of a large file."""
        return local_file(self.open(name))

    def checkpoint_steps(self) -> list[int]:
        """The steps of the committed checkpoints. Takes one listing; no marker is read."""
        return self._steps("checkpoints", r"(\d+)\.json")

    def marker_path(self, step: int) -> str:
        """The place of the marker that makes the checkpoint of a step complete."""
        return f"{self.path}/checkpoints/{step:08d}.json"

    def checkpoint(self, step: int) -> Checkpoint:
        path = self.marker_path(step)
        marker = check_step(CheckpointMarker, self.store.read_json(path), step, self.store.where(path))
        return Checkpoint(self, step, f"{self.path}/attempts/{marker.attempt}/{marker.folder}", marker)

    def withdraw(self, step: int) -> None:
        """Moves the marker of a damaged checkpoint away, after the manifest of a segment that ended there."""
        quarantine(self.store, [Artifact(self.store, self.path, step).manifest_path, self.marker_path(step)])

    def manifest_steps(self) -> list[int]:
        """The steps at which this trajectory was brought to a committed end."""
        return self._steps("", r"manifest-(\d+)\.json")

    def _steps(self, folder: str, name: str) -> list[int]:
        names = self.store.names(f"{self.path}/{folder}".rstrip("/"))
        return [int(match[1]) for match in map(re.compile(name).fullmatch, names) if match]

    def history(self, marker: CheckpointMarker | Manifest | None = None) -> Iterator[dict[str, Any]]:
        """Yields the rows of metrics, in order, of all attempts that led to the manifest or `marker`."""
        for entry in (marker or self.manifest).history:
            file = self.store.reader(f"{self.path}/attempts/{entry.path}", entry)
            yield from decode(file.bytes(), entry.path)


def quarantine(store: Store, markers: Iterable[str]) -> None:
    """Moves markers, in this order, to `damaged/<time>/`; missing ones are left out."""
    stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%S.%fZ")
    for path in markers:
        kept = f"damaged/{stamp}/{path}"
        if store.is_local:  # on disk, a folder, a pipe or a terabyte may be in its place
            store.move_aside(path, kept)
        elif (data := store.read_if_there(path)) is not None:
            store.write_once(kept, data)
            store.remove(path)


def local_file(file: CheckedFile) -> Path:
    """A local file with the checked content of a stored one: itself, or a copy in `cache_folder`, named by
    its digest. A copy is compared with the digest once per process, and made again if it differs."""
    if not file.remote:
        return file.ensure()
    target = cache_folder() / file.record.sha256 / Path(file.name).name
    if not _is_copy(target, file):
        file.check_size()
        target.parent.mkdir(exist_ok=True, mode=0o700)
        partial = target.with_name(f".{target.name}.{uuid.uuid4().hex}")
        try:
            file.download(partial)
            os.replace(partial, target)
        finally:
            partial.unlink(missing_ok=True)
        _compared_here.add(_state(target))
    return target


def cache_folder() -> Path:
    """The folder `APERTUS_CACHE`, else one of this user's below the temporary folder; created if missing.
    StoreError where that fails, or another user could change the copies after they were compared."""
    chosen = os.environ.get("APERTUS_CACHE")
    cache = Path(chosen or Path(tempfile.gettempdir()) / f"apertus-cache-{os.getuid()}")
    try:
        cache.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        message = f"no cache folder can be created at '{cache}': {error.strerror}"
        raise StoreError(f"{message}. Fix: set APERTUS_CACHE to a folder in which you can write") from error
    # another user may leave a link in the temporary folder
    state = os.stat(cache, follow_symlinks=bool(chosen))
    owner, mode = state.st_uid, stat.S_IMODE(state.st_mode)
    if owner != os.getuid() or mode & 0o022:
        raise StoreError(
            f"the cache folder {cache} belongs to user {owner} and has mode {mode:o}; it must belong to user"
            f" {os.getuid()}, and nobody else may write to it. Fix: chmod go-w {cache}, or set APERTUS_CACHE"
            " to another folder"
        )
    return cache


_compared_here: set[tuple[str, int, int, int]] = set()


def _state(copy: Path) -> tuple[str, int, int, int]:
    """The present state of a copy: as it was compared, unless somebody has touched it since."""
    seen = copy.stat()
    return str(copy), seen.st_size, seen.st_mtime_ns, seen.st_ino


def _is_copy(target: Path, file: CheckedFile) -> bool:
    """Whether `target` has the content of `file`."""
    try:
        state = _state(target)
        if state not in _compared_here and target.stat().st_size == file.size:
            with open(target, "rb") as copy:
                if hashlib.file_digest(copy, "sha256").hexdigest() == file.record.sha256:
                    _compared_here.add(state)
    except FileNotFoundError:
        return False
    return state in _compared_here
