"""Copies artifacts, with all that they were made from, to another store.

Invariants: an artifact comes after everything it was made from, its files before its markers, and every file
is compared with the digest that its marker states while it is copied. So the target is a sound store at every
moment, and an interrupted copy can be resumed. Files of a unit that were used up are not copied; their marks
are. What no marker names (logs, leases, attempts without result) is not copied, and neither are the units of
a finished part. A marker that the target has already is left as it is: the same fingerprint is the same work.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from infra.store.inputs import recorded_digest
from infra.store.reading.walk import Contents, Marker, open_contents, reach
from infra.store.records import DamagedError, FileRecord, StoreError, sidecar_path, used_path
from infra.store.store import Store

_ORDER = {"unit": 0, "checkpoint": 1, "manifest": 2}


@dataclass
class Copied:
    """The amount that was copied, and that was there already; bytes are those of files that markers name."""

    artifacts: int = 0
    files: int = 0
    bytes: int = 0
    present_files: int = 0
    present_bytes: int = 0


def closure(store: Store, roots: Iterable[tuple[str, int | None]]) -> list[tuple[Contents, int | None]]:
    """The stored artifacts among `roots` (place and, for a trajectory, step) and all that they were made
    from, inputs first, each with the furthest step wanted of it. StoreError for a damaged marker."""
    opened: dict[str, Contents] = {}

    def inputs_of(path: str) -> list[tuple[str, int | None]]:
        contents = opened[path] = open_contents(store, path)
        for why in contents.damaged.values():
            raise StoreError(why)
        return contents.inputs

    return [
        (opened[path], max((step for step in at if step is not None), default=None))
        for path, at in reach(inputs_of, roots).items()
        if opened[path].files
    ]


def markers_of(contents: Contents, step: int | None) -> list[Marker]:
    """The markers of an artifact up to `step` that are copied, in the order of writing."""
    last = math.inf if step is None else step
    chosen = [marker for marker in contents.markers if (marker.step or 0) <= last]
    if contents.finished:
        chosen = [marker for marker in chosen if marker.kind != "unit"]
    return sorted(chosen, key=lambda marker: (_ORDER[marker.kind], marker.step or 0, marker.path))


def copy_artifacts(
    source: Store,
    target: Store,
    artifacts: Iterable[tuple[Contents, int | None]],
    on_bytes: Callable[[str, int], None] = lambda name, size: None,
) -> Copied:
    """Copies artifacts (`closure`) and the records of their documents. `on_bytes` is called for every file
    that is copied or found. StoreError for a missing or damaged file: no marker that names it is written
    then."""
    amount = Copied()
    target.initialise()
    documents: set[str] = set()
    references: list[tuple[str, str]] = []
    copied: set[str] = set()
    for contents, step in artifacts:
        copied.add(contents.path)
        references += contents.references.items()
        documents |= contents.documents
        if contents.identity:
            path = f"{contents.path}/identity.json"
            target.write_once(path, source.read_whole(path))
        done: set[str] = set()
        for marker in markers_of(contents, step):
            there, used = target.exists(marker.path), contents.used_up(marker)
            for name in used:
                target.overwrite(used_path(name), b"")
            gone = used | {sidecar_path(name) for name in used}
            for name, record in marker.all_files.items():
                if name in done or name in gone:
                    continue
                done.add(name)
                if there or _equal(target, name, record):
                    amount.present_files += 1
                    amount.present_bytes += record.size
                else:
                    _copy_file(source, target, name, record)
                    amount.files += 1
                    amount.bytes += record.size
                on_bytes(name, record.size)
            if not there:
                target.write_once(marker.path, marker.data)
        amount.artifacts += 1
    chosen = [name for name, referrer in references if referrer in copied]
    inputs = [f"inputs/{name}" for name in source.names("inputs")]
    for name in [*chosen, *(path for path in inputs if recorded_digest(source, path) in documents)]:
        target.write_once(name, source.read_whole(name))
    return amount


def _equal(target: Store, name: str, record: FileRecord) -> bool:
    """Whether the target has the file already, by size first, then by content."""
    if target.size(name) != record.size:
        return False
    try:
        target.reader(name, record).check()
    except StoreError:
        return False
    return True


def _copy_file(source: Store, target: Store, name: str, record: FileRecord) -> None:
    try:
        with target.writer(name) as writer:
            for block in source.reader(name, record).blocks():
                writer.write(block)
    except DamagedError as error:
        where = f"(in the store {source.url})"
        raise DamagedError(f"{error} {where}; nothing that names it was copied") from error
