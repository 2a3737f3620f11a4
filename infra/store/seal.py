"""Records of files that something else than `Store.writer` wrote: they are read to compute them.

Invariant: the file itself is not touched; its sidecar, if it needs one, is written before the record is given out.
"""

from __future__ import annotations

from typing import Any

from infra.store.contents import list_files
from infra.store.reader import FETCH_BYTES
from infra.store.records import DamagedError, make_record, sidecar_path
from infra.store.sinks import write_whole
from infra.store.store import Store
from infra.store.writer import Digests


def seal(store: Store, path: str) -> dict[str, Any]:
    """The record of a stored file. DamagedError when it is not there."""
    size = store.size(path)
    if size is None:
        raise DamagedError(f"'{path}' is missing from the store {store.url}")
    digests = Digests(store.piece_bytes)
    for start in range(0, size, FETCH_BYTES):
        digests.update(store.read_range(path, start, min(start + FETCH_BYTES, size)))
    sha256, pieces = digests.result()
    record, sidecar = make_record(size, sha256, pieces, store.piece_bytes)
    if sidecar is not None:
        write_whole(store, sidecar_path(path), sidecar)
    return record


def seal_folder(store: Store, folder: str) -> dict[str, dict[str, Any]]:
    """Records of all files below a folder, by their names in it. Sidecars and temporary files are left out."""
    names = sorted(name[len(folder) + 1 :] for name in list_files(store, folder))
    return {name: seal(store, f"{folder}/{name}") for name in names if not _is_ours(name.rsplit("/", 1)[-1])}


def _is_ours(name: str) -> bool:
    return name.startswith(".tmp-") or (name.startswith(".") and name.endswith(".pieces"))
