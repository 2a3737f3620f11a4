"""Decides which checkpoints of a training artifact stay, and removes the others.

Everything that starts from a checkpoint says so in a small file beside it,
`references/<step>-<fingerprint>.json`, written once, before it starts: a run for all checkpoints in its plan,
a branch for its starting point, every attempt for what it reads. So pruning reads one folder, however large
the store is. The references that an artifact has written go with it (`referrer` names it).

Invariants: a checkpoint is removed only after a newer one is committed. The newest checkpoint, those that are
referred to, and the ends of finished segments are never removed. A marker is removed before its files, so
that a half-removed checkpoint does not count as one. A referrer looks for the marker after it has written its
reference (`hold`), a pruner for references after it has removed the marker: one of the two sees the other,
and if it is the pruner, it puts the marker back.
"""

import logging
from collections.abc import Callable

from infra.store.documents import CheckpointUse
from infra.store.reading.artifact import Artifact
from infra.store.records import StoreError
from infra.store.store import Store

logger = logging.getLogger(__name__)


def refer(store: Store, path: str, step: int, referrer: str) -> None:
    """Notes that `referrer` (`<kind>/<fingerprint>`) starts from a checkpoint of the artifact at `path`."""
    place = f"{path}/references/{step:08d}-{referrer.rsplit('/', 1)[-1]}.json"
    store.write_document(place, CheckpointUse(referrer=referrer))


def hold(store: Store, path: str, step: int, referrer: str) -> None:
    """Like `refer`, for a checkpoint that has to exist. StoreError if it was pruned before."""
    refer(store, path, step, referrer)
    if not store.exists(Artifact(store, path).marker_path(step)):
        gone = f"checkpoint {step} of {path} is no longer in the store {store.url}"
        why = f"it was pruned, or withdrawn as damaged, before {referrer} could refer to it"
        raise StoreError(f"{gone}: {why}. Plan again: that names the steps that were kept")


def referred_steps(store: Store, path: str) -> set[int]:
    """The steps of an artifact that others start from, or are planned to start from. Takes one listing."""
    numbers = {name.partition("-")[0] for name in store.names(f"{path}/references")}
    return {int(number) for number in numbers if number.isdecimal()}


def prune(
    artifact: Artifact, *, keep: int, kept: Callable[[int], bool], before: Callable[[], None] = lambda: None
) -> list[int]:
    """Removes checkpoints after a commit and returns their steps. The `keep` newest stay, and those that are
    `kept` for another reason. An error of `before`, called before each removal, leaves the rest as it is."""
    store = artifact.store
    old = [step for step in sorted(artifact.checkpoint_steps())[: -max(1, keep)] if not kept(step)]
    if old:
        stays = referred_steps(store, artifact.path) | set(artifact.manifest_steps())
        old = [step for step in old if step not in stays]
    removed = []
    for step in old:
        before()
        try:
            folder, marker = artifact.checkpoint(step).folder, artifact.marker_path(step)
        except StoreError as error:
            logger.warning("checkpoint %d is not removed: %s", step, error)
            continue
        data = store.read_bytes(marker)
        store.remove(marker)
        if step in referred_steps(store, artifact.path):  # written since the listing above
            store.write_once(marker, data)
            continue
        store.remove(folder)
        removed.append(step)
    return removed
