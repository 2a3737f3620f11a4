"""What a store keeps and what goes: on disk and in memory."""

from __future__ import annotations

import hashlib
import time
import uuid
from pathlib import Path

import pytest

from infra.store import Artifact, StorageError, Store, StoreError, runs
from infra.store.documents import to_json
from infra.store.maintenance.garbage import GarbageItem, Survey, remove, survey
from infra.store.maintenance.transfer import closure, copy_artifacts
from infra.store.reading.walk import list_files
from infra.store.runs import protected_mark
from infra.store.storage.retry import Retry
from tests.infra.faults import Faults
from tests.infra.maker import WEB, Maker, Stopped, sound

DAY = 86_400.0


@pytest.fixture(params=["file", "memory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    opened = Store.open(
        str(tmp_path / "store") if request.param == "file" else f"memory://{uuid.uuid4().hex}"
    )
    opened.initialise()
    return opened


@pytest.fixture
def maker(store: Store, tmp_path: Path) -> Maker:
    return Maker(store, tmp_path / "scratch")


def in_two_days(store: Store, grace: float = DAY) -> Survey:
    return survey(store, grace=grace, now=time.time() + 2 * DAY)


def later(store: Store) -> list[GarbageItem]:
    """The garbage as it is found two days from now."""
    return in_two_days(store).items


def gone(items: list[GarbageItem]) -> dict[str, str]:
    return {item.path.split("/")[1][0]: item.why for item in items if item.path != "inputs"}


def test_what_a_named_run_refers_to_stays_with_all_it_was_made_from(store: Store, maker: Maker) -> None:
    corpus = maker.data("corpus", "a")
    mixture = maker.data("mixture", "b", (corpus, None))
    trained = maker.training("c", [10], [10], (mixture, None))
    maker.data("export", "d", (trained, 10))
    maker.run("one", part=(trained, 10))
    assert gone(later(store)) == {"d": "no run reaches it", "c": "references of what goes"}


def test_the_last_record_is_the_run_and_a_forgotten_run_keeps_nothing(store: Store, maker: Maker) -> None:
    old, new = maker.data("corpus", "a"), maker.data("corpus", "b")
    maker.run("one", "20200101T000000.000000Z-1", corpus=(old, None))
    maker.run("one", "20200102T000000.000000Z-1", corpus=(new, None))
    assert gone(later(store)) == {"a": "no run reaches it"}
    assert runs.forget(store, "one") == 2
    assert gone(later(store)) == {"a": "no run reaches it", "b": "no run reaches it"}
    with pytest.raises(StoreError, match="there is no run 'one'"):
        runs.forget(store, "one")


def test_what_is_younger_than_the_grace_period_stays_with_its_inputs(store: Store, maker: Maker) -> None:
    maker.data("export", "b", (maker.data("corpus", "a"), None))
    assert survey(store, grace=DAY).items == []
    assert gone(survey(store, grace=0.0, now=time.time() + 1).items) == {
        "a": "no run reaches it",
        "b": "no run reaches it",
    }


def test_an_earlier_record_counts_while_it_is_younger_than_the_grace_period(
    store: Store, maker: Maker
) -> None:
    old, new = maker.data("corpus", "a"), maker.data("corpus", "b")
    now = time.time() + 2 * DAY
    stamp = time.strftime("%Y%m%dT%H%M%S.000000Z", time.gmtime(now - DAY / 2))
    maker.run("one", f"{stamp}-1", corpus=(old, None))
    maker.run("one", f"{stamp}-2", corpus=(new, None))
    assert survey(store, grace=DAY, now=now).items == []
    assert gone(survey(store, grace=DAY / 4, now=now).items) == {"a": "no run reaches it"}


def test_a_lease_that_is_not_released_keeps_what_its_stage_reads(store: Store, maker: Maker) -> None:
    parent = maker.training("a", [10], [10])
    child = maker.attempt("pretrain", "b", (parent, 10)).job.path
    lease = f"{child}/leases/00000001.json"
    store.write_once(lease, to_json({"holder": "x"}))
    # the lease is half an hour old, and nothing else is younger than the grace period
    soon = time.time() + 1800
    assert survey(store, grace=60.0, now=soon).items == []
    store.write_once(f"{child}/leases/00000001-first.beat", to_json({"count": 7, "released": True}))
    assert gone(survey(store, grace=60.0, now=soon).items) == {
        "a": "no run reaches it",
        "b": "no run reaches it",
    }


def test_gc_removes_checkpoints_after_the_last_referenced_step(store: Store, maker: Maker) -> None:
    path = maker.training("a", [10, 20, 30], [20, 30])
    maker.run("short", trained=(path, 20))
    maker.run("long", trained=(path, 30))
    assert later(store) == []
    runs.forget(store, "long")
    found = in_two_days(store)
    items = found.items
    assert [(item.why, sorted(name.rsplit("/", 1)[-1] for name in item.markers)) for item in items] == [
        ("later than any run reaches", ["00000030.json", "manifest-00000030.json"])
    ]
    remove(store, found)
    artifact = Artifact(store, path)
    assert artifact.checkpoint_steps() == [10, 20]
    assert artifact.manifest_steps() == [20]
    for step in (10, 20):
        artifact.checkpoint(step).check()
    assert [row["step"] for row in artifact.history(artifact.checkpoint(20).marker)] == [10, 20]
    assert not store.exists(f"{path}/attempts/first/step-00000030/shard")
    assert later(store) == []


def test_in_an_artifact_that_stays_goes_what_no_marker_names(
    store: Store, maker: Maker, tmp_path: Path
) -> None:
    local = tmp_path / "unit"
    local.write_bytes(b"work" * 10)
    attempt = maker.attempt("corpus", "a")
    attempt.commit_unit("task", files={"unit": local})
    attempt.write_bytes("data.bin", b"data")
    attempt.commit(metrics={})
    store.write_once(log := f"{attempt.job.path}/logs/{attempt.job.attempt}.txt", b"printed")
    dead = maker.attempt("corpus", "a", name="dead")
    dead.write_bytes("half.bin", b"ha")
    store.write_once(of_dead := f"{dead.job.path}/logs/{dead.job.attempt}.txt", b"died")
    unfinished = maker.attempt("prompts", "b")
    unfinished.commit_unit("task", files={"unit": local})
    maker.run("one", a=(attempt.job.path, None), b=(unfinished.job.path, None))
    found = in_two_days(store)
    items = found.items
    assert {(item.why, tuple(item.markers), tuple(item.files), item.bytes) for item in items} == {
        ("an attempt without result", (), (dead.folder("half.bin"), of_dead), 6),
        (
            "units of a finished part",
            (f"{attempt.job.path}/units/task.json",),
            (attempt.folder("units/task/unit"),),
            40 + len(store.read_bytes(f"{attempt.job.path}/units/task.json")),
        ),
    }
    remove(store, found)
    assert Artifact(store, attempt.job.path).bytes("data.bin") == b"data"
    assert store.read_bytes(log) == b"printed"
    assert unfinished.unit("task") is not None
    assert not store.exists(dead.folder("half.bin"))


def test_what_cannot_be_read_is_kept_and_said(store: Store, maker: Maker) -> None:
    path = maker.data("corpus", "a")
    store.fs.pipe_file(store.full(f"{path}/manifest.json"), b"{")
    found = in_two_days(store)
    assert found.items == []
    assert found.notes == [f"'{path}/manifest.json' cannot be read; its artifact is kept as it is"]
    store.write_once("runs/one/20200101T000000.000000Z-1.json", b"[]")
    with pytest.raises(StoreError, match="is not the record of a run"):
        survey(store)


@pytest.mark.parametrize("identity", [b"[]", b"{", b"{}", b'{"inputs": {"corpus": "a"}}', None])
def test_where_it_is_not_known_what_a_run_was_made_from_every_artifact_is_kept(
    store: Store, maker: Maker, identity: bytes | None
) -> None:
    trained = maker.training("b", [10], [10], (maker.data("corpus", "a", inputs=WEB), None))
    store.write_once("inputs/k1.json", to_json({"digest": "d1"}))
    maker.run("one", trained=(trained, 10))
    maker.data("export", "c")
    assert gone(later(store)) == {"c": "no run reaches it"}
    store.remove(f"{trained}/identity.json")
    if identity is not None:
        store.write_once(f"{trained}/identity.json", identity)
    found = in_two_days(store)
    assert found.items == []
    assert (
        f"'{trained}/identity.json' does not say what it was made from, so every artifact is kept"
        in found.notes
    )


def test_a_run_that_was_recorded_after_the_survey_is_seen_before_anything_is_removed(
    store: Store, maker: Maker
) -> None:
    path = maker.data("corpus", "a")
    found = in_two_days(store)
    maker.run("late", corpus=(path, None))
    with pytest.raises(
        StoreError, match="run 'late' was recorded since the store was surveyed; nothing was removed"
    ):
        remove(store, found)
    assert Artifact(store, path).complete and later(store) == []


def folders_of(store: Store) -> set[str]:
    return {
        parent
        for name in list_files(store)
        for parent in [name.rsplit("/", count)[0] for count in range(1, name.count("/") + 1)]
    }


@pytest.mark.parametrize("lasting", [False, True])
def test_a_folder_that_cannot_be_listed_is_listed_again_or_ends_the_survey(
    tmp_path: Path, lasting: bool
) -> None:
    plain = Store.open(str(tmp_path / "store"))
    plain.initialise()
    maker = Maker(plain, tmp_path / "scratch")
    trained = maker.training("a", [10, 20], [20])
    maker.run("one", trained=(trained, 20))
    assert later(plain) == [] and f"{trained}/checkpoints" in folders_of(plain)
    retry = Retry(attempts=2, sleep=lambda seconds: None)
    counted = Faults()
    survey(Store(counted.on(plain.fs), plain.root, retry=retry))
    listings = [number for number, call in enumerate(counted.calls, start=1) if call in ("ls", "find")]
    assert len(listings) > len(folders_of(plain))
    for number in listings:
        store = Store(Faults("fails", number, lasting=lasting).on(plain.fs), plain.root, retry=retry)
        if lasting:
            with pytest.raises(StorageError, match="listing"):
                in_two_days(store)
        else:
            assert in_two_days(store).items == []


def test_records_of_documents_that_nothing_was_made_from_go(store: Store, maker: Maker) -> None:
    maker.run("one", a=(maker.data("corpus", "a", inputs=WEB), None))
    for key, digest in (("k1", "d1"), ("k2", "d2")):
        store.write_once(f"inputs/{key}.json", to_json({"digest": digest, "url": "u"}))
        store.write_once(f"inputs/{digest}.files.jsonl", b"")
    found = in_two_days(store)
    assert [(item.why, sorted(item.files)) for item in found.items] == [
        ("inputs of no run", ["inputs/d2.files.jsonl", "inputs/k2.json"])
    ]
    remove(store, found)
    assert store.names("inputs") == ["d1.files.jsonl", "k1.json"]


def test_the_mark_of_a_protected_stage_goes_with_its_result(store: Store, maker: Maker) -> None:
    path = maker.training("a", [10, 20], [10, 20])
    for step in (10, 20):
        store.write_once(protected_mark(path, step), b"{}")
    maker.run("one", trained=(path, 10))
    remove(store, in_two_days(store))
    assert store.names("protected") == [protected_mark(path, 10).removeprefix("protected/")]
    runs.forget(store, "one")
    remove(store, in_two_days(store))
    assert store.names("protected") == []


@pytest.mark.parametrize("calls", range(12))
def test_removing_that_stops_anywhere_leaves_no_marker_without_its_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, calls: int
) -> None:
    store = Store.open(str(tmp_path / "store"))
    store.initialise()
    maker = Maker(store, tmp_path / "scratch")
    trained = maker.training("a", [10, 20], [20])
    maker.data("export", "b", (trained, 20))
    kept = maker.training("c", [10, 20], [10, 20])
    maker.run("one", trained=(kept, 10))
    left = [calls]
    original = Store.remove

    def removing(self: Store, path: str) -> None:
        if not left[0]:
            raise Stopped
        left[0] -= 1
        original(self, path)

    monkeypatch.setattr(Store, "remove", removing)
    found = in_two_days(store)
    try:
        remove(store, found)
    except Stopped:
        pass
    monkeypatch.undo()
    sound(store)
    remove(store, in_two_days(store))
    sound(store)
    assert later(store) == []
    assert store.names("export") == [] and Artifact(store, kept).manifest_steps() == [10]


def test_references_of_what_goes_go_with_it_and_those_of_what_stays_are_copied(
    store: Store, maker: Maker
) -> None:
    parent = maker.training("a", [10, 20], [20])
    children = [maker.data("export", letter, (parent, 10)) for letter in "bc"]
    marks = [f"{parent}/references/00000010-{child.split('/')[1]}.json" for child in children]
    for child, mark in zip(children, marks, strict=True):
        store.write_once(mark, to_json({"referrer": child}))
    maker.run("one", parent=(parent, 20), child=(children[0], None))
    target = Store.open(f"memory://{uuid.uuid4().hex}")
    copy_artifacts(store, target, closure(store, [(children[0], None)]))
    assert target.exists(marks[0]) and not target.exists(marks[1])
    found = in_two_days(store)
    items = found.items
    assert [(item.path, item.why) for item in items] == [
        (children[1], "no run reaches it"),
        (parent, "references of what goes"),
    ]
    remove(store, found)
    assert store.exists(marks[0]) and not store.exists(marks[1])


def test_digests_of_the_pieces_of_a_long_file_belong_to_it(store: Store, maker: Maker) -> None:
    path = maker.data("corpus", "a")
    beside = f"{path}/attempts/first/.data.bin.pieces"
    digests = hashlib.sha256(b"aaaa").digest() * 250
    store.write_once(beside, digests)
    document = store.read_json(f"{path}/manifest.json")
    document["files"]["data.bin"] |= {"piece_bytes": 4, "pieces": hashlib.sha256(digests).hexdigest()}
    document["history"] = [
        {"path": "first/rows.jsonl", "size": 2, "sha256": hashlib.sha256(b"{}").hexdigest()}
    ]
    store.write_once(f"{path}/attempts/first/rows.jsonl", b"{}")
    store.fs.pipe_file(store.full(f"{path}/manifest.json"), to_json(document))
    maker.run("one", part=(path, None))
    assert later(store) == []
    target = Store.open(f"memory://{uuid.uuid4().hex}")
    assert copy_artifacts(store, target, closure(store, [(path, None)])).files == 3
    assert target.read_bytes(beside) == digests
