"""The artifact store: what a stage produces, on any fsspec URL. See `infra.store.store` for the layout and
its guarantees.

    reading        what is committed
    writing        one attempt at one part
    maintenance    verification, garbage collection, transfer
    inputs, runs   documents outside the store; named runs
    store          the store itself: its layout, and files that are checked
    files          the content of one file
    storage        calls of the filesystem below

Each imports only what is below it, `documents` and `records`.
"""

from infra.store.reading.artifact import Artifact, Checkpoint
from infra.store.records import DamagedError, StoreError
from infra.store.storage.retry import StorageError
from infra.store.store import FORMAT, Store
from infra.store.writing.attempt import Attempt

__all__ = [
    "FORMAT",
    "Artifact",
    "Attempt",
    "Checkpoint",
    "DamagedError",
    "StorageError",
    "Store",
    "StoreError",
]
