"""Checks again what is stored: every document against its checksum, every `identity.json` against the
fingerprint in the name of its folder, and every file that a marker names, piece by piece.

Invariants: `verify` only reads. `withdraw` moves markers below `damaged/`; files stay where they are. It
withdraws the markers that name a damaged file, so the next run finds the artifact missing and makes it again.
The mark of a protected stage is never withdrawn. Stages that read a damaged artifact are named and kept: they
compared its digests when they read it.
"""

from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial

from infra.store.documents import Lock, Protected, RunDocument
from infra.store.files.reader import CheckedFile, in_order
from infra.store.inputs import ROWS, recorded_files
from infra.store.reading.artifact import Artifact, quarantine
from infra.store.reading.walk import ARTIFACT, FileEntry, artifacts, list_files, open_contents
from infra.store.records import StoreError
from infra.store.store import PROTECTED, Store
from specs.foreign import Foreign, ForeignError, checked

READERS = 8
RECORDS: dict[str, type[Foreign]] = {"inputs": Lock, PROTECTED: Protected, "runs": RunDocument}  # by folder


@dataclass(frozen=True)
class Damage:
    """Something that is not as it was committed. `markers` name it, and are what `withdraw` removes; `file`
    is empty for an unreadable marker, `pieces` for a file that is gone or has another size."""

    artifact: str
    markers: tuple[str, ...]
    file: str
    what: str
    pieces: tuple[int, ...] = ()
    history: bool = False


@dataclass
class Verified:
    """What was read, and which damage was found. `names`: artifact -> name of the stage's part; `readers`:
    artifact -> those made from it; `without_checksum`: documents in which no change would be noticed."""

    markers: int = 0
    files: int = 0
    bytes: int = 0
    damages: list[Damage] = field(default_factory=list)
    names: dict[str, str] = field(default_factory=dict)
    readers: dict[str, list[str]] = field(default_factory=dict)
    without_checksum: list[str] = field(default_factory=list)

    def rerun(self) -> list[dict[str, str]]:
        """Damaged parts, then those made from them, nearest first: `{"name", "artifact", "because"}`."""
        damaged = [damage.artifact for damage in self.damages if not damage.history]
        reasons = {artifact: "damaged" for artifact in damaged if ARTIFACT.match(artifact)}
        queue = deque(reasons)
        while queue:
            artifact = queue.popleft()
            for reader in self.readers.get(artifact, []):
                if reader not in reasons:
                    reasons[reader] = f"made from {self.names.get(artifact, artifact)}"
                    queue.append(reader)
        return [
            {"name": self.names.get(path, path), "artifact": path, "because": because}
            for path, because in reasons.items()
        ]


@dataclass
class _NamedFile:
    """A file, the markers that name it, and the numbers of its pieces that differ."""

    file: CheckedFile
    artifact: str
    history: bool
    markers: list[str] = field(default_factory=list)
    differing: list[int] = field(default_factory=list)


def verify(
    store: Store,
    chosen: Iterable[str] | None = None,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> Verified:
    """Reads and checks artifacts; by default all of the store, with its records of runs and inputs.
    `on_progress` is called with bytes done and bytes in all."""
    result = Verified()
    store.without_checksum.clear()  # of what was read before
    everything = artifacts(list_files(store))
    with ThreadPoolExecutor(READERS, "verify") as pool:
        named = _read_markers(store, pool, everything, set(everything if chosen is None else chosen), result)
        if chosen is None:
            _read_records(store, pool, result)
        broken = {marker for damage in result.damages for marker in damage.markers}
        result.without_checksum = sorted(store.without_checksum - broken)
        total, done = sum(entry.file.size for entry in named), 0
        result.files, result.bytes = len(named), total
        on_progress(0, total)
        for entry, problem in zip(named, pool.map(lambda entry: _look(entry.file), named), strict=True):
            if problem:
                result.damages.append(_damage(entry, problem))
                total -= entry.file.size
        damaged = {damage.file for damage in result.damages}
        checks = (
            partial(_differing, entry, span)
            for entry in named
            if entry.file.name not in damaged
            for span in entry.file.spans()
        )
        for entry, length, pieces in in_order(pool, checks, 2 * READERS):
            done += length
            on_progress(done, total)
            entry.differing += pieces
        for entry in named:
            if entry.differing:
                result.damages.append(_damage(entry, str(entry.file.damaged(entry.differing))))
    return result


def _read_markers(
    store: Store,
    pool: ThreadPoolExecutor,
    everything: dict[str, dict[str, FileEntry]],
    chosen: set[str],
    result: Verified,
) -> list[_NamedFile]:
    files: dict[tuple[str, str], _NamedFile] = {}
    others = [path for path in everything if path not in chosen]
    identities = dict(
        zip(others, pool.map(lambda path: Artifact(store, path).readable_identity, others), strict=True)
    )
    for artifact in sorted(chosen & everything.keys()):
        contents = open_contents(store, artifact, everything[artifact], pool.map)
        identities[artifact] = contents.identity
        own = f"{artifact}/identity.json"
        damaged = contents.damaged
        if contents.identity is not None:
            hashed = f"{contents.kind}/{contents.identity.computed_fingerprint}"
            if hashed != artifact:
                why = f"what it states is hashed to {hashed}, which is not its folder"
                damaged = damaged | {own: str(store.damaged(own, why))}
        elif contents.begun:
            damaged = {own: str(store.missing(own))} | damaged
        for path, why in damaged.items():
            manifests = [m.path for m in contents.markers if m.kind == "manifest" and path == own]
            result.damages.append(Damage(artifact, (path, *manifests), "", why))
        result.markers += len(contents.markers) + len(contents.references)
        result.markers += len(contents.damaged.keys() - {own})
        for marker in contents.markers:
            used = contents.used_up(marker)
            for history, records in ((False, marker.files), (True, marker.rows)):
                for name, record in records.items():
                    if name in used:
                        continue
                    entry = _NamedFile(store.reader(name, record), artifact, history)
                    files.setdefault((name, record.sha256), entry).markers.append(marker.path)
    for path, identity in identities.items():
        if identity is not None:
            result.names[path] = identity.name
            for place in {ref.place for ref in identity.inputs.values() if ref.place is not None}:
                result.readers.setdefault(place, []).append(path)
    return list(files.values())


def _read_records(store: Store, pool: ThreadPoolExecutor, result: Verified) -> None:
    """Checks records of runs, protected stages and documents; a list of documents must make its digest."""
    paths = [f"{folder}/{name}" for folder in ("inputs", PROTECTED) for name in store.names(folder)]
    paths += [
        f"runs/{pipeline}/{name}"
        for pipeline in store.names("runs")
        for name in store.names(f"runs/{pipeline}")
    ]
    result.markers += len(paths)

    def read(path: str) -> str:
        try:
            if path.endswith(ROWS):
                recorded_files(store, path.removeprefix("inputs/").removesuffix(ROWS))
            else:
                checked(RECORDS[path.split("/")[0]], store.read_json(path))
            return ""
        except ForeignError as error:
            return str(store.damaged(path, error))
        except StoreError as error:
            return str(error)

    for path, problem in zip(paths, pool.map(read, paths), strict=True):
        if problem:
            result.damages.append(Damage(path.rsplit("/", 1)[0], (path,), "", problem))


def _look(file: CheckedFile) -> str:
    """The problem with the size or the list of digests of a file; empty when there is none."""
    try:
        file.check_size()
        file.digests  # noqa: B018  (they are loaded and compared here)
        return ""
    except StoreError as error:  # damaged, or a link that leads out of the store
        return str(error)


def _differing(entry: _NamedFile, span: tuple[int, int]) -> tuple[_NamedFile, int, list[int]]:
    """The file, the bytes of its pieces in a span, and the numbers of those that differ."""
    (first, last), file = span, entry.file
    length = min(last * file.piece_bytes, file.size) - first * file.piece_bytes
    return entry, length, file.differing(first, last)


def _damage(entry: _NamedFile, what: str) -> Damage:
    markers, pieces = tuple(entry.markers), tuple(entry.differing)
    return Damage(entry.artifact, markers, entry.file.name, what, pieces, entry.history)


def withdraw(store: Store, damages: Iterable[Damage]) -> list[str]:
    """Moves the markers of what is damaged below `damaged/<time>/` and returns their paths. A checkpoint of
    which only the rows of metrics are damaged stays: its files are sound."""
    named = {marker for damage in damages if not damage.history for marker in damage.markers}
    gone = sorted(marker for marker in named if not marker.startswith(f"{PROTECTED}/"))
    quarantine(store, reversed(gone))  # a manifest goes before the checkpoint that it names
    return gone
