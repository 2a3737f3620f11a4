"""Finds and removes garbage: what no named run reaches.

An artifact is reached if the last record of a named run, or one younger than the grace period, refers to it,
if it may be running, or if a reached artifact was made from it. It may be running if it has a file younger
than the grace period, or a lease that is not released or whose holder is a process of this machine. Ages
compare this machine's clock with the storage's, so nothing is removed while this one is ahead. Of a reached
trajectory everything up to the furthest reached step stays. From a reached artifact, attempts that came to
nothing, which no marker names, and units of a finished part are removed.

Invariants: a removal follows a survey that was made after the removal was asked for. All markers are removed
before any file: a crash in the middle leaves files without a marker, which the next collection finds, and
never a marker without its files. Nothing is removed when a run was recorded since the survey. A document that
cannot be read keeps its artifact; if it is not known what a reached artifact was made from, every artifact
stays.
"""

import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from infra.store import runs
from infra.store.inputs import recorded_digest
from infra.store.reading.walk import (
    Contents,
    FileEntry,
    Marker,
    artifacts,
    list_files,
    open_contents,
    reach,
    time_of,
)
from infra.store.store import Store, StoreError
from infra.store.writing.lease import Beat, holder_of

GRACE = 86_400.0  # seconds
LEASE_GRACE = 3_600.0  # seconds that a lease counts as held after its last change, whatever the grace period
CLOCK_AHEAD = 600.0  # seconds that this machine's clock may be ahead of the storage's
Why = Literal[
    "no run reaches it",
    "later than any run reaches",
    "an attempt without result",
    "units of a finished part",
    "references of what goes",
    "inputs of no run",
]
END = None  # in place of a step: the whole trajectory


@dataclass
class GarbageItem:
    """Markers and files of an artifact to remove, for one reason; `marks`: of a protected stage."""

    path: str
    kind: str
    name: str
    why: Why
    marks: list[str] = field(default_factory=list)
    markers: list[str] = field(default_factory=list)
    files: list[str] = field(default_factory=list)
    bytes: int = 0
    whole: bool = False

    @property
    def count(self) -> int:
        return len(self.markers) + len(self.files)


@dataclass
class Survey:
    """A store as it was found. `bytes` and `files`: those of the whole store; `live`: the artifacts that may
    be running; `notes`: what could not be read; `records`: those of all runs, by place."""

    items: list[GarbageItem]
    bytes: int
    files: int
    reached: int
    runs: list[str]
    live: list[str]
    notes: list[str]
    records: frozenset[str]

    @property
    def freed(self) -> int:
        return sum(item.bytes for item in self.items)


def survey(store: Store, *, grace: float = GRACE, now: float | None = None) -> Survey:
    """Finds what no named run reaches, by one listing and the markers of artifacts; nothing younger than
    `grace` seconds, nor what it was made from. StoreError for a damaged record of a run."""
    now = time.time() if now is None else now
    records = _records(store)
    listing = list_files(store)
    stored = {path: open_contents(store, path, files) for path, files in artifacts(listing).items()}
    live = [path for path, contents in stored.items() if _may_run(store, contents, grace, now)]
    roots: list[tuple[str, int | None]] = [(path, END) for path in live]
    for name in runs.names(store):
        stamps = runs.stamps(store, name)
        for record in [runs.read(store, name, stamp) for stamp in stamps]:
            if record.stamp == stamps[-1] or now - record.time < grace:
                roots += record.parts.values()
    steps = reach(lambda path: stored[path].inputs if path in stored else (), roots)
    documents = {digest for path in steps if path in stored for digest in stored[path].documents}
    unknown = sorted(path for path in steps if path in stored and not stored[path].knows_inputs)
    if unknown:
        steps = {path: {END} for path in stored}
    items = [
        item
        for contents in stored.values()
        for item in _garbage(contents, steps.get(contents.path), contents.path in live)
    ]
    whole = {item.path for item in items if item.whole}
    for gone in items:
        for marker in stored[gone.path].markers:
            mark = runs.protected_mark(gone.path, marker.step)
            if marker.kind == "manifest" and marker.path in gone.markers and mark in listing:
                gone.marks.append(mark)
    items += [item for contents in stored.values() if (item := _references(contents, whole)) is not None]
    items += [] if unknown else _inputs(store, listing, documents, grace, now)
    damaged = [name for contents in stored.values() for name in contents.damaged]
    notes = [f"'{name}' cannot be read; its artifact is kept as it is" for name in damaged]
    silent = "does not say what it was made from, so every artifact is kept"
    notes += [f"'{path}/identity.json' {silent}" for path in unknown]
    total, reached = sum(file.size for file in listing.values()), len(steps.keys() & stored.keys())
    return Survey(items, total, len(listing), reached, runs.names(store), live, notes, records)


def _records(store: Store) -> frozenset[str]:
    return frozenset(f"{name}/{stamp}" for name in runs.names(store) for stamp in runs.stamps(store, name))


def remove(
    store: Store,
    surveyed: Survey,
    on_item: Callable[[GarbageItem], None] = lambda item: None,
    clock: Callable[[], float] = time.time,
) -> int:
    """Removes what a survey found and returns the bytes freed. `on_item` is called when an item is gone.
    StoreError before that if a run was recorded since the survey, or this machine's clock is ahead."""
    _compare_clocks(store, clock)
    if new := sorted(_records(store) - surveyed.records):
        since = f"run '{new[0].split('/')[0]}' was recorded since the store was surveyed"
        raise StoreError(f"{since}; nothing was removed. Run the command again")
    order = {"manifest": 0, "checkpoints": 1, "units": 2}
    markers = [
        (order.get(name[len(item.path) + 1 :].split("/")[0].split(".")[0].split("-")[0], 3), name)
        for item in surveyed.items
        for name in item.markers
    ]
    for mark in [mark for item in surveyed.items for mark in item.marks]:
        store.remove(mark)
    for _, name in sorted(markers):
        store.remove(name)
    for item in surveyed.items:
        for path in [item.path] if item.whole else _folders(store, item.files):
            store.remove(path)
        on_item(item)
    return surveyed.freed


def _compare_clocks(store: Store, clock: Callable[[], float]) -> None:
    """Raises StoreError when files look older to this machine than they are."""
    probe = f".tmp-{uuid.uuid4().hex}"
    store.replace(probe, b"clock")
    try:
        here, written = clock(), time_of(store, probe)
    finally:
        store.remove(probe)
    if written is not None and (ahead := here - written) > CLOCK_AHEAD:
        raise StoreError(
            f"this machine's clock is {ahead:,.0f} s ahead of that of the store {store.url}, "
            "so young files look old; nothing was removed. Fix: set the clock"
        )


def _may_run(store: Store, contents: Contents, grace: float, now: float) -> bool:
    """Whether a run may work at an artifact. Files without a time are old, such leases held."""
    if any(file.modified is not None and now - file.modified < grace for file in contents.files.values()):
        return True
    folder, longest = f"{contents.path}/leases/", max(grace, LEASE_GRACE)
    leases = {name: file.modified for name, file in contents.files.items() if name.startswith(folder)}
    if held := [name for name, when in leases.items() if when is None or now - when < longest]:
        return not _released(store, contents, max(held))
    # This machine's clock dates the files of a local store, and may have jumped since the last change.
    holder = holder_of(store, contents.path) if leases and store.is_local else None
    return holder is not None and holder.on_this_machine


def _released(store: Store, contents: Contents, lease: str) -> bool:
    """Whether the beat of the newest claim says that the lease is released."""
    generation = lease.rpartition("/")[2].split("-")[0].split(".")[0]
    for name in contents.files:
        if name.startswith(f"{contents.path}/leases/{generation}"):
            try:
                if Beat.read(store.read_bytes(name)).released:
                    return True
            except StoreError:
                continue
    return False


def _garbage(contents: Contents, reached: set[int | None] | None, live: bool) -> list[GarbageItem]:
    if live or contents.damaged:
        return []
    if reached is None:
        item = GarbageItem(contents.path, contents.kind, contents.name, "no run reaches it", whole=True)
        item.markers = [marker.path for marker in contents.markers]
        item.files = [name for name in contents.files if name not in item.markers]
        item.bytes = sum(file.size for file in contents.files.values())
        return [item]
    last = None if END in reached else max(step for step in reached if step is not None)

    def why(marker: Marker) -> Why | None:
        if marker.step is not None and last is not None and marker.step > last:
            return "later than any run reaches"
        return "units of a finished part" if marker.kind == "unit" and contents.finished else None

    kept = [marker for marker in contents.markers if why(marker) is None]
    needed = {name for marker in kept for name in marker.all_files}
    attempts = {attempt for marker in kept for attempt in marker.attempts}
    logs = {f"{contents.path}/logs/{attempt}.txt" for attempt in attempts}
    items: dict[Why, GarbageItem] = {}

    def item_of(reason: Why) -> GarbageItem:
        return items.setdefault(reason, GarbageItem(contents.path, contents.kind, contents.name, reason))

    stays = needed | logs
    for marker in contents.markers:
        if (reason := why(marker)) is not None:
            item = item_of(reason)
            files = [name for name in marker.all_files if name in contents.files and name not in stays]
            stays |= {*files}  # as far as the next items are concerned
            item.markers.append(marker.path)
            item.files += files
            item.bytes += sum(contents.files[name].size for name in (marker.path, *files))
    folders = (f"{contents.path}/attempts/", f"{contents.path}/logs/")
    for name, file in contents.files.items():
        if name.startswith(folders) and name not in stays:
            item = item_of("an attempt without result")
            item.files.append(name)
            item.bytes += file.size
    return list(items.values())


def _references(contents: Contents, whole: set[str]) -> GarbageItem | None:
    """The references that artifacts to be removed have written beside a checkpoint of one that stays."""
    files = [name for name, referrer in contents.references.items() if referrer in whole]
    item = GarbageItem(contents.path, contents.kind, contents.name, "references of what goes", files=files)
    item.bytes = sum(contents.files[name].size for name in files)
    return item if files and contents.path not in whole else None


def _inputs(
    store: Store, listing: dict[str, FileEntry], documents: set[str], grace: float, now: float
) -> list[GarbageItem]:
    """Records of documents that no reached artifact was made from; cheap to make again."""
    item = GarbageItem("inputs", "inputs", "inputs", "inputs of no run")
    for name, file in listing.items():
        if not name.startswith("inputs/") or file.modified is None or now - file.modified < grace:
            continue
        try:
            digest = recorded_digest(store, name)
        except StoreError:
            continue
        if digest is not None and digest not in documents:
            item.files.append(name)
            item.bytes += file.size
    return [item] if item.files else []


def _folders(store: Store, files: list[str]) -> list[str]:
    """The files, or, if everything in a folder is removed, the folder."""
    going = set(files)
    by_folder: dict[str, list[str]] = {}
    for name in files:
        by_folder.setdefault(name.rsplit("/", 1)[0], []).append(name)
    chosen: list[str] = []
    for folder, inside in by_folder.items():
        whole = folder != "inputs" and set(list_files(store, folder)) <= going
        chosen += [folder] if whole else inside
    return chosen
