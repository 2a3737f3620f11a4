"""Bringing a store of an older format to this one.

Format 1 had the size and SHA-256 of whole files, and rows of metrics without either. Every file is read once, compared, and gets the
digests of its pieces.

Invariants: files are not touched and none is removed. Markers alone are rewritten, each at once, by one that says the same and more. A
store says that its migration has begun before anything is changed, so no program of either format works on it meanwhile, and that it is
done after all is done. So it may be interrupted anywhere and begun again: what has the new form is left as it is.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from infra.store.artifact import put_away
from infra.store.records import DamagedError, StoreError, check_files, inside, one_name
from infra.store.seal import seal
from infra.store.store import FORMAT, Store, to_json
from infra.store.verify import artifacts, markers_of

READERS = 4
OLDEST = 1


@dataclass
class Migrated:
    """What was done. `rewritten` markers; `damaged`: those that named a file that is not what they state, and why (they are kept below
    `damaged/`, and the next run makes the part again); `lost`: rows of metrics that were gone already."""

    rewritten: list[str] = field(default_factory=list)
    damaged: dict[str, str] = field(default_factory=dict)
    lost: list[str] = field(default_factory=list)


def migrate(store: Store, on_marker: Callable[[str], None] = lambda path: None) -> Migrated:
    """Brings a store (opened with `any_format`) to `FORMAT`. StoreError for a store of a format that this program does not know.

    Nothing else may work on the store meanwhile: what a run of the older program is writing is not seen.
    """
    document = store.format()
    found = None if document is None else document.get("format")
    if document is None:
        raise StoreError(f"there is no store at '{store.url}': it has no format.json")
    if document == {"format": FORMAT}:
        return Migrated()
    if found not in (OLDEST, FORMAT):
        raise StoreError(f"the store '{store.url}' has format {found}; this program migrates format {OLDEST} to {FORMAT}")
    store.replace("format.json", to_json({"format": FORMAT, "migrating_from": OLDEST}))
    done = Migrated()
    with ThreadPoolExecutor(READERS, "migrate") as pool:
        for artifact in artifacts(store):
            sealed: dict[str, dict[str, Any]] = {}
            for path in markers_of(store, artifact):
                on_marker(path)
                try:
                    _migrate_marker(store, artifact, path, sealed, pool, done)
                except StoreError as error:
                    done.damaged[path] = str(error)
                    put_away(store, [path])
    store.replace("format.json", to_json({"format": FORMAT}))
    return done


def _migrate_marker(
    store: Store, artifact: str, path: str, sealed: dict[str, dict[str, Any]], pool: ThreadPoolExecutor, done: Migrated
) -> None:
    what, marker = f"'{path}' in the store {store.url}", store.read_json(path)
    if not isinstance(marker, dict):
        raise DamagedError(f"{what} is damaged: not a marker")
    folder = f"{artifact}/attempts/{one_name(marker.get('attempt'), what)}"
    if path.startswith(f"{artifact}/checkpoints/"):
        folder += f"/{inside(marker.get('folder'), what)}"
    files = check_files(marker.get("files"), what)
    places = {name: _place(record, f"{folder}/{name}", artifact, what) for name, record in files.items()}

    def upgrade(name: str) -> dict[str, Any]:
        record = files[name]
        return record if "pieces" in record else record | _compare(store, places[name], record, sealed)

    new = marker | {"files": dict(zip(files, pool.map(upgrade, files), strict=True))}
    if "history" in marker:
        new["history"] = [entry for old in marker["history"] if (entry := _history(store, artifact, old, sealed, what, done)) is not None]
    if new != marker:
        store.replace(path, to_json(new))
        done.rewritten.append(path)


def _place(record: dict[str, Any], place: str, artifact: str, what: str) -> str:
    """Where a file lies: a unit says so itself."""
    stated = inside(record.get("path", place), what)
    if not stated.startswith(f"{artifact}/attempts/"):
        raise StoreError(f"{what} names '{stated}', which is not a path inside the artifact {artifact}")
    return stated


def _compare(store: Store, place: str, record: dict[str, Any], sealed: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """The new record of a file, which is read. DamagedError when it is not what the old one states."""
    new = sealed.get(place) or seal(store, place)
    sealed[place] = new
    if (new["size"], new["sha256"]) != (record["size"], record["sha256"]):
        raise DamagedError(
            f"'{place}' is damaged: {new['size']} bytes with SHA-256 {new['sha256'][:12]}..., {record['size']} bytes with "
            f"{record['sha256'][:12]}... are stated"
        )
    return new


def _history(store: Store, artifact: str, old: Any, sealed: dict[str, dict[str, Any]], what: str, done: Migrated) -> dict[str, Any] | None:
    """Format 1 names rows of metrics by their place alone."""
    if isinstance(old, dict):
        return old
    place = f"{artifact}/attempts/{inside(old, what)}"
    try:
        sealed[place] = sealed.get(place) or seal(store, place)
    except DamagedError as error:
        done.lost.append(str(error))
        return None
    return {"path": old, **sealed[place]}
