"""What the folder of one fingerprint holds: its markers, the files that each of them names, and what no marker names.

Who removes or copies artifacts works on this, so that both agree on what belongs to what.

Invariant: one listing, and one read per marker. A file is named by its place in the store; what this program does not know it never counts
as anything's.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Literal

from infra.store.artifact import Artifact
from infra.store.documents import CheckpointMarker, Identity, Input, Manifest, Reference, check, check_unit
from infra.store.listing import tree
from infra.store.records import DamagedError, FileRecord, sidecar_path, sidecar_record
from infra.store.store import Store, StoreError

MarkerKind = Literal["unit", "checkpoint", "manifest"]
LISTING_BYTES = 2**32
"""What the listing of a store may carry, some million names: bounds the time of the one call that object storage needs for it."""
ARTIFACT = re.compile(r"^([a-z][a-z0-9_]*)/([0-9a-f]{32})$")
_MARKERS: tuple[tuple[MarkerKind, re.Pattern[str]], ...] = (
    ("unit", re.compile(r"^units/(?P<key>.+)\.json$")),
    ("checkpoint", re.compile(r"^checkpoints/(?P<step>\d+)\.json$")),
    ("manifest", re.compile(r"^manifest(-(?P<step>\d+))?\.json$")),
)


@dataclass(frozen=True)
class Listed:
    """One stored file: size in bytes, and unix time of its last change where the storage tells it."""

    size: int
    modified: float | None


@dataclass(frozen=True)
class Marker:
    """A commit marker. `files`: what it names, by place in the store, with what it states of each; `attempts`: whose logs belong to it."""

    kind: MarkerKind
    path: str
    step: int | None
    data: bytes
    files: dict[str, FileRecord]
    attempts: frozenset[str]


@dataclass
class Contents:
    """An artifact's folder. `files` by place in the store; `damaged`: markers that cannot be read; `references`: files in which another
    artifact says that it starts from a checkpoint of this one, with the place of that artifact."""

    path: str
    files: dict[str, Listed]
    identity: Identity | None = None
    markers: list[Marker] = field(default_factory=list)
    damaged: list[str] = field(default_factory=list)
    references: dict[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Of the part, as the run that made it called it."""
        return self.identity.name if self.identity else ""

    @property
    def kind(self) -> str:
        return self.path.split("/")[0]

    @property
    def says_inputs(self) -> bool:
        """Whether it is known what it was made from. Where nothing is committed yet, nothing was made."""
        return self.identity is not None or not (self.markers or self.damaged)

    @property
    def inputs(self) -> list[tuple[str, int | None]]:
        """Place and, of a checkpoint, step of every artifact that it was made from."""
        return [(read.place, read.step) for read in self._inputs if read.place is not None]

    @property
    def documents(self) -> set[str]:
        """Digests of the documents outside the store that it was made from."""
        return {read.fingerprint for read in self._inputs if read.place is None}

    @property
    def _inputs(self) -> list[Input]:
        return list(self.identity.inputs.values()) if self.identity else []

    @property
    def finished(self) -> bool:
        """Whether the manifest of a part without steps is there."""
        return any(marker.kind == "manifest" and marker.step is None for marker in self.markers)


def protected_mark(path: str, step: int | None) -> str:
    """Where it is noted, outside the artifact, that a part of a protected stage has finished."""
    return f"protected/{path.replace('/', '-')}{'' if step is None else f'-{step}'}.json"


def list_files(store: Store, path: str = "") -> dict[str, Listed]:
    """All files below a folder, or of the whole store, by place in the store. OSError when a part of it cannot be listed."""
    root = store.full(path) if path else store.root
    begin = len(store.root) + 1

    def call(folder: str, ask: Callable[[], Any]) -> Any:
        def fresh() -> Any:
            store.fs.invalidate_cache()
            return ask()

        return store.call(f"listing '{folder[begin:]}'", fresh, size=LISTING_BYTES)

    try:
        found = tree(store.fs, root, call=call)
    except FileNotFoundError:
        return {}
    return {name[begin:]: Listed(int(entry.get("size") or 0), _modified(entry)) for name, entry in sorted(found.items())}


def time_of(store: Store, path: str) -> float | None:
    """When a file was written, by the storage's clock, where it says so."""
    return _modified(store.call(f"looking for '{path}'", lambda: store.fs.info(store.full(path))))


def _modified(entry: Mapping[str, Any]) -> float | None:
    for key in ("LastModified", "mtime", "last_modified", "created"):
        value = entry.get(key)
        if isinstance(value, datetime):
            return value.timestamp()
        if isinstance(value, (int, float)):
            return float(value)
    return None


def open_contents(store: Store, path: str, files: dict[str, Listed] | None = None) -> Contents:
    """Reads the markers of an artifact. `files`: its part of a listing that is at hand."""
    contents = Contents(path, list_files(store, path) if files is None else files)
    for name in contents.files:
        inner = name[len(path) + 1 :]
        try:
            if inner == "identity.json":
                contents.identity = Artifact(store, path).identity
                continue
            if inner.startswith("references/"):
                reference = check(Reference, store.read_json(name), f"'{name}' in the store {store.url}")
                contents.references[name] = reference.referrer
                continue
            found = next(((kind, match) for kind, pattern in _MARKERS if (match := pattern.match(inner))), None)
            if found is not None:
                contents.markers.append(_marker(store, path, name, *found))
        except StoreError:
            contents.damaged.append(name)
    return contents


def _marker(store: Store, path: str, name: str, kind: MarkerKind, match: re.Match[str]) -> Marker:
    what, found = f"'{name}' in the store {store.url}", store.read_document(name)
    if found is None:
        raise DamagedError(f"{what} is gone")
    data, document = found
    attempts = f"{path}/attempts"
    stated = match.groupdict().get("step")
    step = int(stated) if stated else None
    files: dict[str, FileRecord]
    if kind == "unit":
        unit = check_unit(document, path, what)
        files, named = {record.path: record for record in unit.files.values()}, {unit.attempt}
    else:
        marker = check(CheckpointMarker, document, what) if kind == "checkpoint" else check(Manifest, document, what)
        own = f"{attempts}/{marker.attempt}"
        inside = f"{own}/{marker.folder}" if isinstance(marker, CheckpointMarker) else own
        files = {f"{inside}/{file}": record for file, record in marker.files.items()}
        files |= {f"{attempts}/{rows.path}": rows for rows in marker.history}
        named = {marker.attempt, *(marker.attempts if isinstance(marker, CheckpointMarker) else ())}
    sidecars = {sidecar_path(file): sidecar_record(record) for file, record in files.items() if isinstance(record.pieces, str)}
    return Marker(kind, name, step, data, files | sidecars, frozenset(named))
