"""What checkpoints take: bytes, numbers of them, requests, and how often they are made."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from flows.planning.estimate import storage
from infra.store import Attempt, Store
from infra.store.files import sinks
from infra.store.writing.retention import prune
from specs.cluster import Cluster
from specs.intervals import young_daly
from specs.launch import Parallel
from specs.optimizer import OptimizerSpec
from tests.flows.planning.segments import segment
from tests.jobs import job_at


def test_a_checkpoint_holds_float32_weights_and_the_states() -> None:
    adamw = segment(optimizer=OptimizerSpec(name="adamw", lr=1e-4).resolved({}))
    rounded = segment(optimizer=OptimizerSpec(lr=1e-4, state_dtype="bfloat16").resolved({}))
    parameters = 8_053_338_176
    found = [storage.checkpoint_bytes(each) for each in (adamw, segment(), rounded)]
    assert found == [12 * parameters, 16 * parameters, 10 * parameters]


@pytest.mark.parametrize(
    "settings",
    [
        {"interval": 10, "keep": 2},
        {"interval": 10, "keep": 3, "milestones": [20, 50, 57, 100, 125]},
        {"interval": 10, "keep": 1, "keep_every": 25},
        {"interval": 1000, "keep": 2, "keep_every": 15, "milestones": [31]},
        {"interval": 1000, "keep": 2},
    ],
)
@pytest.mark.parametrize("rollback", [None, {"rollback_interval": 20, "rollback_margin": 45}])
def test_planned_checkpoints_are_those_that_pruning_keeps(
    tmp_path: Path, settings: dict[str, object], rollback: dict[str, int] | None
) -> None:
    anomalies = {"nonfinite": "rollback", **rollback} if rollback else {}
    spec = segment(start_step=30, end_step=125, checkpoint=settings, anomalies=anomalies)
    store = Store.open(f"memory://{tmp_path.name}")
    store.initialise()
    writing = Attempt(job_at("pretrain/f", store, tmp_path), store)
    writing.begin()
    written, most = [spec.start_step], 0
    for step in range(31, 126):
        if spec.checkpoint_due(step) or step == spec.end_step:
            with store.writer(writing.folder(f"{Attempt.checkpoint_folder(step)}/shard.bin")) as file:
                file.write(b"weights")
            writing.commit_checkpoint(step, {}, files={"shard.bin": file.record})
            written.append(step)
            most = max(most, len(writing.artifact.checkpoint_steps()))
            back = spec.anomalies.rollback_from(step, spec.start_step)
            prune(
                writing.artifact,
                keep=spec.checkpoint.keep,
                kept=lambda old, back=back: spec.checkpoint.kept(old) or back <= old,
            )
    found = storage.checkpoints(spec, None)
    kept, gap = (
        len(writing.artifact.checkpoint_steps()),
        max(after - before for before, after in pairwise(written)),
    )
    assert (found.written, found.kept, found.most, found.gap) == (len(written) - 1, kept, most, gap)


def test_the_best_checkpoint_by_each_metric_is_one_more_at_most() -> None:
    found = [
        storage.checkpoints(
            segment(end_step=end, checkpoint={"interval": 100, "keep": 1, "best": best}), None
        )
        for end, best in ((1000, []), (1000, ["val_loss", "val_loss/a"]), (100, ["val_loss"]))
    ]
    assert [(saved.written, saved.kept, saved.most) for saved in found] == [(10, 1, 2), (10, 3, 4), (1, 1, 1)]


def test_an_interval_that_is_a_time_is_counted_in_steps() -> None:
    timed = segment(end_step=1000, checkpoint={"interval": "10 min", "milestones": [7]})
    assert storage.written_steps(timed, 3.0) == [7, 200, 400, 600, 800, 1000]
    assert storage.written_steps(timed, None) == [7, 1000]


def test_the_interval_that_wastes_least_is_that_of_the_copy_and_no_shorter_than_the_upload() -> None:
    """16 bytes for each of 8.05B parameters, 64 processes, two copies of each shard: 4.03 GB to a GPU, at
    10 GB/s; 129 GB at 20 GB/s."""
    cluster = {
        "gpu": "H100",
        "gpus_per_node": 8,
        "storage_bandwidth": 20,
        "host_bandwidth": 10,
        "mean_time_between_failures": "8d",
    }
    spec = segment(parallel=Parallel(dp_replicate=2))
    saved = storage.checkpoints(spec, 2.0)
    size = 16 * 8_053_338_176
    found = storage.saving(spec, 64, saved, 2.0, Cluster.model_validate(cluster))
    assert (found.copy, found.upload, found.interval) == pytest.approx((size / 32 / 10e9, size / 20e9, 200.0))
    assert found.best == pytest.approx(young_daly(size / 32 / 10e9, 86_400))
    slow = storage.saving(spec, 64, saved, 2.0, Cluster.model_validate({**cluster, "storage_bandwidth": 0.1}))
    assert slow.best == slow.upload == pytest.approx(size / 0.1e9)
    for missing in ("storage_bandwidth", "host_bandwidth", "mean_time_between_failures"):
        less = Cluster.model_validate({name: value for name, value in cluster.items() if name != missing})
        assert storage.saving(spec, 64, saved, 2.0, less).best is None


class Bucket:
    """A store, and the client of its server, that counts what is asked."""

    def __init__(self) -> None:
        self.requests, self.fs = 0, self

    def full(self, path: str) -> str:
        return path

    def call(self, what: str, work: Callable[[], Any], size: int = 0) -> Any:
        return work()

    def split_path(self, path: str) -> tuple[str, str, None]:
        return "bucket", path, None

    def call_s3(self, method: str, **arguments: object) -> dict[str, str]:
        self.requests += 1
        return {"UploadId": "1", "ETag": "1"}

    def pipe_file(self, path: str, data: bytes) -> None:
        self.requests += 1


@pytest.mark.parametrize("size", [0, 3, 4, 5, 8, 9, 23, 24, 25, 60])
def test_requests_are_those_that_writing_the_file_makes(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    monkeypatch.setattr(sinks, "PART_BYTES", 4)
    monkeypatch.setattr(sinks, "PARTS_OF_A_SIZE", 2)  # so that parts are 4, 4, 8, 8, 16, ... bytes
    bucket, left = Bucket(), size
    sink = sinks.MultipartSink(bucket, "file")  # type: ignore[arg-type]
    while left >= sink.next_length():
        length = sink.next_length()
        sink.put(bytes(length))
        left -= length
    sink.finish(bytes(left))
    digests = 1 if size >= 4 else 0
    assert storage.requests_of(1, size).put - storage.requests_of(1, 0).put == bucket.requests + digests - 1


def test_requests_of_a_checkpoint_are_those_that_a_server_saw() -> None:
    # docs/object_storage.md: two ranks, a small file each, 4 PUT, 3 GET, 3 HEAD, 2 LIST; here one PUT and one
    # HEAD more for DCP's index
    found = storage.requests_of(2, 1000)
    assert (found.put, found.get, found.head, found.list) == (5, 3, 4, 2)
    assert storage.requests_of(2, 2 * 40 * 2**20).put == 2 * (3 + 3) + 3  # 40 MiB are 3 parts of 16 MiB
