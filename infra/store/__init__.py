"""The artifact store: what a stage produces, on any fsspec URL. See `infra.store.store` for the layout and its guarantees."""

from infra.store.artifact import Artifact, Checkpoint
from infra.store.attempt import Attempt
from infra.store.records import DamagedError, StoreError
from infra.store.retry import StorageError
from infra.store.store import FORMAT, Store

__all__ = ["FORMAT", "Artifact", "Attempt", "Checkpoint", "DamagedError", "StorageError", "Store", "StoreError"]
