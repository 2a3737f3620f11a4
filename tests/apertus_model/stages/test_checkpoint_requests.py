"""What committing a checkpoint costs on object storage, as the server sees it: what
`docs/object_storage.md` lists."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from apertus_model.progress import Progress
from apertus_model.stages.train import SegmentCheckpoints, SegmentRecorder
from apertus_model.tracking import Tracker
from apertus_model.trainer.checkpoint import Saved
from infra.store import Attempt, Store
from infra.store.writing.lease import Leases, Timing
from specs.anomalies import Anomalies
from specs.launch import Checkpointing
from tests.infra.moto import Moto
from tests.infra.s3 import requests
from tests.jobs import job_at

KEPT = 12
WRITING = Counter(PutObject=4, HeadObject=3, GetObject=3)  # two files, rows of metrics, the marker
LISTING = Counter(ListObjectsV2=1)
LEASE = PRUNE = BEST = LISTING
LOOKING = LISTING + LISTING + LEASE  # at who refers to what is old, and what ends a segment
# a step, and looking again at who refers to it
REMOVING = Counter(GetObject=2, HeadObject=1, ListObjectsV2=5, DeleteObjects=2)


class Training:
    """What a training stage does when all ranks have written, of a segment with `checkpoint`."""

    def __init__(self, attempt: Attempt, **checkpoint: Any) -> None:
        segment: Any = SimpleNamespace(
            checkpoint=Checkpointing(**checkpoint), anomalies=Anomalies(), start_step=0
        )
        data: Any = SimpleNamespace()
        self.attempt = attempt
        progress = Progress(None)
        recorder = SegmentRecorder(attempt, progress, segment, Tracker({}), resumed={})
        self.checkpoints = SegmentCheckpoints(
            attempt, progress, segment, data, recorder, resumed={}, passes_before={}
        )

    def requests_of_a_save(self, step: int) -> Counter[str]:
        """Of two ranks with a small file each; the first checkpoint has the lowest held-out loss."""
        folder = self.attempt.folder(Attempt.checkpoint_folder(step))
        facts = {"tokens": step, "validation": {"text": float(step)}, "validation_step": step}
        with requests() as sent:
            names = [f"rank-{rank:05d}.safetensors" for rank in range(2)]
            files = {name: self.attempt.store.write_bytes(f"{folder}/{name}", b"weights") for name in names}
            self.checkpoints._commit(Saved(step, files, 0.0, 0.0), facts, [{"step": step, "loss": 1.0}])
        return Counter(sent)


@pytest.fixture
def attempt(moto: Moto, tmp_path: Path) -> Iterator[Attempt]:
    """One that holds the lease."""
    path = "pretrain/" + "f" * 32
    with moto.in_environment() as bucket:
        store = Store.open(f"{bucket}/store")
        leases = Leases(store, path, Timing(settle=0))
        lease = leases.claim("first", leases.look())
        assert lease is not None
        yield Attempt(job_at(path, store, tmp_path, lease=lease.generation), store)


def test_the_requests_of_a_commit_do_not_grow_with_the_steps_that_are_kept(attempt: Attempt) -> None:
    """With a lease, and the best of all checkpoints kept."""
    training = Training(attempt, keep=KEPT + 1, best=["val_loss"])
    costs = [training.requests_of_a_save(step) for step in range(1, KEPT + 1)]
    assert costs == [WRITING + LEASE + BEST + PRUNE] * KEPT


def test_the_requests_of_a_commit_that_removes_what_is_old(attempt: Attempt) -> None:
    training = Training(attempt, keep=2)
    costs = [training.requests_of_a_save(step) for step in (1, 2, 3)]
    assert costs == [WRITING + LEASE + PRUNE] * 2 + [WRITING + LEASE + PRUNE + LOOKING + REMOVING]
    assert training.requests_of_a_save(4) == costs[-1]


def test_a_resumed_stage_reads_each_stored_marker_once(attempt: Attempt) -> None:
    before = Training(attempt, keep=9, best=["val_loss"])
    for step in (1, 2, 3):
        before.requests_of_a_save(step)
    again = Training(attempt, keep=9, best=["val_loss"])
    costs = [again.requests_of_a_save(step) for step in (4, 5)]
    assert costs == [WRITING + LEASE + BEST + PRUNE + Counter(GetObject=3), WRITING + LEASE + BEST + PRUNE]
