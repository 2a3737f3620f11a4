"""Lists what a store holds: artifacts, their markers and files, and what each artifact was made from, for
verification, garbage collection, transfer and lineage, which so agree on what belongs to what.

Invariant: one listing, and one read per marker. A file is named by its place in the store; a file that this
program does not know never counts as belonging to anything.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Literal

from infra.store.documents import (
    CheckpointMarker,
    CheckpointUse,
    Identity,
    InputRecord,
    Manifest,
    check,
    check_step,
    check_unit,
)
from infra.store.reading.artifact import Artifact
from infra.store.records import DamagedError, FileRecord, StoreError, sidecar_path, sidecar_record, used_path
from infra.store.storage.listing import tree
from infra.store.store import Store

MarkerKind = Literal["unit", "checkpoint", "manifest"]
LISTING_BYTES = 2**32
"""The most bytes that the listing of a store may carry, some million names: bounds the time of the one call
that object storage needs for it."""
ARTIFACT = re.compile(r"^(?!(?:inputs|runs|reports|protected|damaged)/)([a-z][a-z0-9_]*)/([0-9a-f]{32})$")
_DOCUMENT = re.compile(
    r"identity\.json|manifest[^/]*\.json|checkpoints/[^./][^/]*\.json"
    r"|units/(.*/)?[^./][^/]*\.json|references/[^./][^/]*"
)
_STEP = re.compile(r"(?:checkpoints/|manifest-)(\d+)\.json")


@dataclass(frozen=True)
class FileEntry:
    """One stored file: size in bytes, and unix time of its last change if the storage tells it."""

    size: int
    modified: float | None


@dataclass(frozen=True)
class Marker:
    """A commit marker."""

    kind: MarkerKind
    path: str
    step: int | None
    data: bytes  # as stored
    files: dict[str, FileRecord]  # those that the marker names, by place in the store
    rows: dict[str, FileRecord]  # files with rows of metrics, likewise
    attempts: frozenset[str]  # those whose logs belong to the marker

    @property
    def all_files(self) -> dict[str, FileRecord]:
        """Files, rows of metrics, and the sidecars of both."""
        named = self.files | self.rows
        return named | {
            sidecar_path(file): sidecar_record(record)
            for file, record in named.items()
            if isinstance(record.pieces, str)
        }


@dataclass
class Contents:
    """The contents of an artifact's folder."""

    path: str
    files: dict[str, FileEntry]  # by place in the store
    identity: Identity | None = None
    markers: list[Marker] = field(default_factory=list)
    damaged: dict[str, str] = field(default_factory=dict)  # documents that cannot be read, and why
    # files that say which artifact starts from a checkpoint of this one
    references: dict[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The name of the part in the run that made it."""
        return self.identity.name if self.identity else ""

    @property
    def kind(self) -> str:
        return self.path.split("/")[0]

    @property
    def begun(self) -> bool:
        """Whether the folder has more than the remains of attempts that came to nothing."""
        return bool(self.identity or self.markers or self.damaged)

    @property
    def knows_inputs(self) -> bool:
        """Whether it is known what the artifact was made from; so if nothing is committed."""
        return self.identity is not None or not (self.markers or self.damaged)

    @property
    def inputs(self) -> list[tuple[str, int | None]]:
        """The place and, for a checkpoint, the step of every artifact that this one was made from."""
        return [(ref.place, ref.step) for ref in self._inputs if ref.place is not None]

    @property
    def documents(self) -> set[str]:
        """The digests of the documents outside the store that the artifact was made from."""
        return {ref.fingerprint for ref in self._inputs if ref.place is None}

    @property
    def _inputs(self) -> list[InputRecord]:
        return list(self.identity.inputs.values()) if self.identity else []

    def used_up(self, marker: Marker) -> set[str]:
        """The files of a unit that were used up and removed, according to their marks."""
        return {name for name in marker.files if used_path(name) in self.files}

    @property
    def finished(self) -> bool:
        """Whether the manifest of a part without steps is there."""
        return any(marker.kind == "manifest" and marker.step is None for marker in self.markers)


def list_files(store: Store, path: str = "") -> dict[str, FileEntry]:
    """All files below a folder, or of the whole store, by place in the store. Includes a folder in the place
    of a document. OSError when a folder cannot be listed."""
    root = store.full(path) if path else store.root
    begin = len(store.root) + 1

    def call(folder: str, ask: Callable[[], Any]) -> Any:
        def fresh() -> Any:
            store.fs.invalidate_cache()
            return ask()

        return store.call(f"listing '{folder[begin:]}'", fresh, size=LISTING_BYTES)

    try:
        entries = tree(store.fs, root, call=call, as_file=lambda folder: folder.endswith(".json"))
    except FileNotFoundError:
        return {}
    return {
        name[begin:]: FileEntry(int(entry.get("size") or 0), _modified(entry))
        for name, entry in sorted(entries.items())
    }


def time_of(store: Store, path: str) -> float | None:
    """The unix time at which a file was written, by the storage's clock; None if it does not tell."""
    return _modified(store.call(f"looking for '{path}'", lambda: store.fs.info(store.full(path))))


def _modified(entry: Mapping[str, Any]) -> float | None:
    for key in ("LastModified", "mtime", "last_modified", "created"):
        value = entry.get(key)
        if isinstance(value, datetime):
            return value.timestamp()
        if isinstance(value, (int, float)):
            return float(value)
    return None


def artifacts(listing: Mapping[str, FileEntry]) -> dict[str, dict[str, FileEntry]]:
    """The files of each artifact in the listing of a store, by the artifact's place."""
    files: dict[str, dict[str, FileEntry]] = {}
    for name, file in listing.items():
        path = "/".join(name.split("/")[:2])
        if ARTIFACT.match(path) and name.count("/") >= 2:
            files.setdefault(path, {})[name] = file
    return files


def open_contents(
    store: Store,
    path: str,
    files: dict[str, FileEntry] | None = None,
    each: Callable[..., Iterable[Any]] = map,
) -> Contents:
    """Reads an artifact's documents. `files`: of an earlier listing; `each`: `map`, or an executor's."""
    contents = Contents(path, list_files(store, path) if files is None else files)
    names = [name for name in contents.files if _DOCUMENT.fullmatch(name[len(path) + 1 :])]

    def read(name: str) -> Identity | CheckpointUse | Marker | StoreError:
        try:
            return _read(store, path, name)
        except StoreError as error:
            return error

    for name, document in zip(names, each(read, names), strict=True):
        if isinstance(document, StoreError):
            contents.damaged[name] = str(document)
        elif isinstance(document, Identity):
            contents.identity = document
        elif isinstance(document, CheckpointUse):
            contents.references[name] = document.referrer
        else:
            contents.markers.append(document)
    return contents


def _read(store: Store, path: str, name: str) -> Identity | CheckpointUse | Marker:
    inner, what = name[len(path) + 1 :], store.where(name)
    if inner == "identity.json":
        return Artifact(store, path).identity
    if (content := store.read_document(name)) is None:
        raise DamagedError(f"{what} is gone")
    data, document = content
    if inner.startswith("references/"):
        return check(CheckpointUse, document, what)
    if inner.startswith("units/"):
        unit = check_unit(document, path, what)
        files: dict[str, FileRecord] = {record.path: record for record in unit.files.values()}
        return Marker("unit", name, None, data, files, {}, frozenset([unit.attempt]))
    numbered = _STEP.fullmatch(inner)
    if numbered is None and inner != "manifest.json":
        raise StoreError(f"{what} is no marker: its name has no step")
    step, attempts = int(numbered[1]) if numbered else None, f"{path}/attempts"
    kind: MarkerKind = "checkpoint" if inner.startswith("checkpoints/") else "manifest"
    if kind == "checkpoint":
        marker = check_step(CheckpointMarker, document, step, what)
        folder = f"{attempts}/{marker.attempt}/{marker.folder}"
        files = {f"{folder}/{file}": record for file, record in marker.files.items()}
        made_by, history = {marker.attempt, *marker.attempts}, marker.history
    else:
        manifest = check_step(Manifest, document, step, what)
        files = {manifest.place(path, file): record for file, record in manifest.files.items()}
        made_by, history = {manifest.attempt}, manifest.history
    rows: dict[str, FileRecord] = {f"{attempts}/{record.path}": record for record in history}
    return Marker(kind, name, step, data, files, rows, frozenset(made_by))


def reach(
    inputs_of: Callable[[str], Iterable[tuple[str, int | None]]], roots: Iterable[tuple[str, int | None]]
) -> dict[str, set[int | None]]:
    """The artifacts in `roots` and all that they were made from, inputs first: place -> the steps at which it
    is read. `inputs_of`, called once for each: place and, for a checkpoint, step of its inputs."""
    steps: dict[str, set[int | None]] = {}
    order: list[str] = []
    open_: list[tuple[str, Iterator[tuple[str, int | None]]]] = [("", iter(roots))]
    while open_:
        path, inputs = open_[-1]
        if (ref := next(inputs, None)) is None:
            open_.pop()
            order.append(path)
            continue
        place, step = ref
        if place not in steps:
            open_.append((place, iter(inputs_of(place))))
        steps.setdefault(place, set()).add(step)
    return {path: steps[path] for path in order[:-1]}
