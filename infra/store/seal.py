"""The record of a file that was written without one, by the program of format 1: it is read to compute it.

Invariant: the file itself is not touched; its sidecar, if it needs one, is written before the record is given out.
"""

from __future__ import annotations

from typing import Any

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
