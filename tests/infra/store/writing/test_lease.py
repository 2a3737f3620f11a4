"""Leases: one works at a part, others wait; who died or slept is taken over, and told so when it wakes."""

from __future__ import annotations

import os
import resource
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import s3fs
from fsspec.implementations.memory import MemoryFileSystem

from infra.store import Artifact, Attempt, Store, StoreError
from infra.store.documents import to_json
from infra.store.writing.lease import Holder, Lease, LeaseLost, Leases, Timing, holder_of
from infra.store.writing.retention import prune
from tests.infra.sealed import sealed
from tests.infra.store.attempts import attempt as attempt_of
from tests.infra.store.attempts import save
from tests.infra.store.writing.leases import FIRST, PART, Clock, claim, elsewhere, held, timing


@pytest.fixture(params=["file", "file without links", "memory", "s3"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    if request.param == "s3":
        endpoint = request.getfixturevalue("moto").endpoint
        fs = s3fs.S3FileSystem(
            key="testing", secret="testing", endpoint_url=endpoint, use_listings_cache=False
        )
        bucket = f"bucket-{uuid.uuid4().hex}"
        fs.makedirs(bucket, exist_ok=True)
        return Store(fs, f"{bucket}/store")
    if request.param == "memory":
        return Store.open(f"memory://{tmp_path.name}")
    if request.param == "file without links":
        request.getfixturevalue("no_links")
    return Store.open(str(tmp_path / "store"))


def test_one_holds_and_the_next_one_follows_its_release(store: Store) -> None:
    first = held(store)
    assert claim(store, "second") is None
    assert Leases(store, PART).look().holder == first.holder
    first.beat()
    assert claim(store, "second") is None
    first.release()
    second = held(store, "second")
    assert (first.generation, second.generation) == (1, 2)
    assert store.names(f"{PART}/leases") == ["00000002.json"]  # what is over is cleaned up
    second.beat()
    assert store.names(f"{PART}/leases") == ["00000002-second.beat", "00000002.json"]


def test_of_sixteen_claimers_at_once_one_wins(store: Store) -> None:
    barrier, winners = threading.Barrier(16), list[str]()

    def go(name: str) -> None:
        leases = Leases(store, PART, timing())
        seen = leases.look()
        barrier.wait()
        if leases.claim(name, seen) is not None:
            winners.append(name)

    threads = [threading.Thread(target=go, args=(f"claimer-{number}",)) for number in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(winners) == 1
    seen = Leases(store, PART).look()
    assert seen.holder is not None
    assert seen.holder.attempt == winners[0]


class Overwriting(Store):
    """On storage without exclusive writes, at the worst moment: every writer is told that it was the
    first, and the last one's stays."""

    def write_once(self, path: str, data: bytes) -> bool:
        self.fs.pipe_file(self.full(path), data)
        return True


@pytest.fixture
def unconditional() -> Iterator[Store]:
    fs = MemoryFileSystem()
    yield Overwriting(fs, "/overwriting")
    fs.rm("/overwriting", recursive=True)


def test_without_exclusive_writes_the_overwritten_claimer_withdraws(unconditional: Store) -> None:
    later: list[Lease | None] = []
    clock = Clock()
    second = Leases(unconditional, PART, timing())
    free = second.look()

    def overtaken(seconds: float) -> None:
        later.append(second.claim("second", free))

    first = Leases(unconditional, PART, timing(clock, sleep=overtaken))
    assert first.claim("first", first.look()) is None
    assert later[0] is not None


def test_one_that_was_overwritten_later_finds_out_at_its_next_beat(unconditional: Store) -> None:
    other = Leases(unconditional, PART, timing())
    free = other.look()
    first = held(unconditional)
    first.beat()
    second = other.claim("second", free)
    assert second is not None
    second.beat()
    with pytest.raises(LeaseLost, match="taken over by attempt second"):
        first.beat()
    second.beat()


@pytest.mark.parametrize("skew", [-3e7, 300.0, 3e7])
def test_a_holder_that_beats_is_alive_however_far_the_clocks_are_apart(local: Store, skew: float) -> None:
    clock = Clock(skew)
    lease = elsewhere(local, since="1970-01-01T00:00:00+00:00")
    observer = Leases(local, PART, timing(clock))
    for _ in range(50):
        lease.beat()
        assert not observer.look().free
        clock.sleep(5.0)


def test_a_holder_on_another_machine_is_taken_over_when_its_counter_stands_still_for_the_lease(
    store: Store,
) -> None:
    clock = Clock(1e6)
    lost = elsewhere(store)
    lost.beat()
    # the holder's own seconds count, not the observer's
    observer = Leases(store, PART, timing(clock, seconds=7.0))
    waited = 0.0
    while not (seen := observer.look()).free:
        clock.sleep(3.0)
        waited += 3.0
    assert 60.0 < waited <= 66.0
    assert seen.why == "no heartbeat for 60 s"
    assert observer.claim("second", seen) is not None
    with pytest.raises(LeaseLost, match="taken over by attempt second"):
        lost.beat()


def test_an_observer_that_slept_does_not_take_its_own_absence_for_the_holders(store: Store) -> None:
    clock = Clock()
    lease = elsewhere(store)
    observer = Leases(store, PART, timing(clock))
    assert not observer.look().free
    clock.sleep(3600.0)
    assert not observer.look().free
    lease.beat()
    clock.sleep(3.0)
    assert not observer.look().free


def test_who_lost_the_lease_commits_and_prunes_nothing(store: Store, tmp_path: Path) -> None:
    lease = held(store)
    fenced = attempt_of(store, tmp_path, "first", path=PART, lease=lease.generation)
    for step in (10, 20):
        save(fenced, step)
        fenced.commit_checkpoint(step, {}, files=sealed(fenced, step))
    fenced.commit_unit("a")
    save(fenced, 30)
    elsewhere(store, "second", generation=2)
    local = tmp_path / "unit"
    local.write_text("work")
    for write in (
        lambda: fenced.commit_checkpoint(30, {}, files=sealed(fenced, 30)),
        lambda: fenced.commit_unit("b", files={"unit": local}),
        lambda: fenced.commit(metrics={}),
        lambda: prune(fenced.artifact, keep=1, kept=lambda step: False, before=fenced.check_lease),
    ):
        with pytest.raises(LeaseLost, match=r"taken over by attempt second on far\.example"):
            write()
    artifact = Artifact(store, PART)
    assert artifact.checkpoint_steps() == [10, 20]
    assert store.names(f"{PART}/units") == ["a.json"]
    assert not artifact.complete


def test_an_attempt_whose_lease_is_only_released_may_commit_its_last(store: Store, tmp_path: Path) -> None:
    """A launcher that is gone says nothing about its stage, which writes a last checkpoint."""
    lease = held(store)
    lease.release()
    attempt_of(store, tmp_path, "first", path=PART, lease=lease.generation).commit(metrics={})
    assert Artifact(store, PART).complete


def test_storage_that_fails_in_the_middle_of_a_claim_leaves_it_free(
    local: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    leases = Leases(local, PART, timing())
    seen = leases.look()
    with monkeypatch.context() as patch:
        patch.setattr(local, "names", lambda path: (_ for _ in ()).throw(OSError("503 Slow Down")))
        with pytest.raises(OSError, match="503"):
            leases.claim("first", seen)
    assert claim(local, "second") is not None


def test_a_late_claim_of_a_generation_that_was_cleaned_up_is_not_believed(store: Store) -> None:
    slow = Leases(store, PART, timing())
    seen = slow.look()
    held(store).release()
    second = held(store, "second")
    assert slow.claim("slow", seen) is None
    second.beat()


@pytest.mark.parametrize(
    "change",
    [
        {"attempt": "../../../escape"},
        {"attempt": "a/b"},
        {"attempt": "a\0"},
        {"host": "\x1b[2J"},
        {"seconds": 1e9},
        {"since": "\x1b["},
        {"x": 1},
    ],
)
def test_a_claim_that_states_something_else_is_refused_by_name(store: Store, change: dict[str, Any]) -> None:
    store.write_once(FIRST, to_json(Holder.here("first", 60.0).model_dump() | change))
    with pytest.raises(StoreError, match=r"leases/00000001\.json' in the store .* is damaged"):
        Leases(store, PART).look()
    assert holder_of(store, PART) is None


def test_names_that_are_no_leases_count_for_nothing(local: Store) -> None:
    for name in ("x.json", "99.json", "00000007.beat", "99999999-..beat"):
        local.write_once(f"{PART}/leases/{name}", b"{}")
    assert held(local).generation == 1


def test_a_listing_that_is_behind_is_asked_again_after_a_pause(
    local: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    held(local).release()
    old, names = 2 * [local.names(f"{PART}/leases")], local.names
    second, clock = held(local, "second"), Clock()
    monkeypatch.setattr(local, "names", lambda path: old.pop() if old else names(path))
    assert Leases(local, PART, timing(clock)).look().holder == second.holder
    assert clock.now == 2.0


def test_calls_of_storage_are_few_and_do_not_grow(local: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    for name in ("names", "read_if_there", "write_once", "remove", "exists"):
        original = getattr(local, name)
        monkeypatch.setattr(
            local,
            name,
            lambda *a, original=original, name=name: calls.append(name) or original(*a),
        )

    def made() -> list[str]:
        try:
            return list(calls)
        finally:
            calls.clear()

    for generation in range(1, 5):
        leases = Leases(local, PART, timing())
        seen = leases.look()
        made()
        lease = leases.claim(f"attempt-{generation}", seen)
        assert made() == [
            "write_once",
            "names",
            "read_if_there",
            *(["remove", "remove"] if generation > 1 else []),
        ]
        assert lease is not None
        lease.beat()
        assert made() == ["names"]  # and the write of the beat
        Leases(local, PART).look()
        assert made() == ["names", "read_if_there", "read_if_there"]
        lease.release()


def test_attempts_made_without_a_launcher_need_no_lease(store: Store, tmp_path: Path) -> None:
    elsewhere(store)
    writing: Attempt = attempt_of(store, tmp_path, path=PART)
    writing.commit(metrics={})
    assert Artifact(store, PART).complete


@pytest.mark.parametrize("stated", ["soon", "0", "-5", "1e9", "nan"])
def test_seconds_that_are_none_are_a_message(monkeypatch: pytest.MonkeyPatch, stated: str) -> None:
    monkeypatch.setenv("APERTUS_LEASE_SECONDS", stated)
    with pytest.raises(
        StoreError, match=r"APERTUS_LEASE_SECONDS is .* Fix: set it to seconds between 1 and 86,400"
    ):
        Timing()


def test_the_environment_states_the_seconds_of_a_lease(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("APERTUS_LEASE_SECONDS", "90.5")
    assert Timing().seconds == 90.5


def test_a_beat_that_a_full_disk_refuses_leaves_nothing(tmp_path: Path) -> None:
    store = Store.open(str(tmp_path))
    leases = Leases(store, PART)
    lease = leases.claim("first", leases.look())
    assert lease is not None
    before = sorted(os.listdir(tmp_path / PART / "leases"))

    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            lease.beat()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert sorted(os.listdir(tmp_path / PART / "leases")) == before
