"""The artifact store: what a stage produces, on any fsspec URL. See `infra.store.store` for the layout and its guarantees."""

from infra.store.artifact import Artifact, Checkpoint
from infra.store.attempt import Attempt
from infra.store.store import FORMAT, Store, StoreError

__all__ = ["FORMAT", "Artifact", "Attempt", "Checkpoint", "Store", "StoreError"]
