"""Storage that fails in any way, at any call: nothing that was committed is damaged, nothing else is read,
the next run ends the work.

The work is that of two stages, as the launcher and the stages do it: one of units and files, one of
checkpoints; or it is what happens to a store beside its stages: leases, logs, references, retention, garbage,
copies. It runs over a filesystem that fails at its k-th call, for every k and every kind of fault. On S3 the
files of checkpoints go up in parts.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import tempfile
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import fsspec
import pytest

from infra.store import Artifact, Attempt, Store, StoreError, runs
from infra.store.documents import to_json
from infra.store.maintenance.garbage import GRACE, remove, survey
from infra.store.maintenance.transfer import closure, copy_artifacts
from infra.store.maintenance.verify import verify
from infra.store.records import LocatedRecord
from infra.store.writing.lease import Leases, Timing
from infra.store.writing.retention import prune, refer
from specs.base import fingerprint
from specs.job import Job
from tests.infra.committed import damaged
from tests.infra.faults import HANGS, KINDS, Faults, like
from tests.infra.store.writing.leases import Clock
from tests.jobs import job_at

UNITS = ("task-0", "task-1")
STEPS = (10, 20, 30)
PART_BYTES = 768
MEMORY = Path("/dev/shm")
STAMP = "20200101T000000.000000Z-one"
Task = Callable[[Store, Path], None]
DATA, TRAINED = (f"{kind}/{fingerprint(kind, 1, {'seed': 1}, {})}" for kind in ("corpus", "pretrain"))


def job(store: Store, scratch: Path, path: str, **fields: Any) -> Job:
    return job_at(path, store, scratch, uuid.uuid4().hex[:8], identity={"seed": 1}, **fields)


def work(store: Store, scratch: Path) -> None:
    """Does what is not done yet."""
    store.initialise()
    if not Artifact(store, DATA).complete:
        make_data(Attempt(job(store, scratch, DATA), store))
    if not Artifact(store, TRAINED, STEPS[-1]).complete:
        resume = last_sound(Artifact(store, TRAINED))
        train(Attempt(job(store, scratch, TRAINED, resume_step=resume), store))


def make_data(attempt: Attempt) -> None:
    attempt.begin()
    for key in UNITS:
        if attempt.unit(key) is None:
            local = attempt.workdir / key
            local.write_bytes(key.encode() * 100)
            attempt.commit_unit(key, files={"part.bin": local}, data={"documents": 3})
    units = [attempt.unit(key) for key in UNITS]
    shard = attempt.workdir / "shard"
    shard.write_bytes(b"".join(checked(attempt.store, unit.files["part.bin"]) for unit in units if unit))
    attempt.put(shard, "shard.bin")
    attempt.write_json("counts.json", {"documents": 6})
    attempt.commit(metrics={"documents": 6})


def checked(store: Store, record: LocatedRecord) -> bytes:
    """A file of a unit, as stages read it."""
    data = store.read_bytes(record.path)
    if hashlib.sha256(data).hexdigest() != record.sha256:
        raise StoreError(f"{record.path} is damaged")
    return data


def train(attempt: Attempt) -> None:
    attempt.begin()
    store, begin = attempt.store, attempt.job.resume_step or 0
    for step in STEPS:
        if step > begin:
            folder = attempt.folder(attempt.checkpoint_folder(step))
            files = {}
            for rank in range(2):
                with store.writer(f"{folder}/__{rank}_0.distcp") as file:
                    file.write(f"weights of rank {rank} at step {step} ".encode() * 50)
                files[f"__{rank}_0.distcp"] = file.record
            attempt.add_metrics({"step": step, "loss": 1.0 / step})
            attempt.commit_checkpoint(step, {"tokens": 100 * step}, files=files)
    attempt.commit(metrics={}, step=STEPS[-1])


def last_sound(artifact: Artifact) -> int | None:
    """As `Runner.sound_checkpoint` does."""
    for step in sorted(artifact.checkpoint_steps(), reverse=True):
        try:
            artifact.checkpoint(step).check()
            return step
        except StoreError:
            artifact.withdraw(step)
    return None


def result(store: Store) -> dict[str, Any]:
    """What was made, read as stages read it."""
    found = {
        name: hashlib.sha256(Artifact(store, DATA).bytes(name)).hexdigest()
        for name in ("shard.bin", "counts.json")
    }
    trained = Artifact(store, TRAINED, STEPS[-1])
    trained.checkpoint(STEPS[-1]).check()
    files = {Path(name).name: record.sha256 for name, record in trained.manifest.files.items()}
    return found | files | {"losses": [(row["step"], row["loss"]) for row in trained.history()]}


def keep(store: Store, scratch: Path) -> None:
    """What is done beside the stages with what they made, until nothing is left to do."""
    clock = Clock()
    leases = Leases(store, TRAINED, Timing(seconds=60, clock=clock, sleep=clock.sleep))
    while (lease := leases.claim(uuid.uuid4().hex, seen) if (seen := leases.look()).free else None) is None:
        clock.sleep(leases.timing.look)
    lease.beat()
    artifact = Artifact(store, TRAINED)
    refer(store, TRAINED, STEPS[1], "sft/" + "a" * 32)
    if not runs.names(store):
        store.write_once(
            f"runs/named/{STAMP}.json",
            to_json({"parts": {"a": {"path": DATA}, "b": {"path": TRAINED, "step": STEPS[-1]}}}),
        )
    log = scratch / "log.txt"
    log.write_text("step 10")
    store.upload(log, f"{TRAINED}/attempts/{lease.holder.attempt}/log.txt")
    prune(artifact, keep=1, kept=lambda step: False, before=lease.check)
    assert set(artifact.checkpoint_steps()) <= {*STEPS[1:]}
    artifact.withdraw(STEPS[1])
    store.replace("note.json", to_json(lease.generation))
    lease.release()
    remove(store, survey(store, now=time.time() + 2 * GRACE))
    assert artifact.checkpoint_steps() == [STEPS[-1]]
    target = Store(store.fs, f"{store.root}-copy", piece_bytes=store.piece_bytes)
    target.initialise()
    copy_artifacts(store, target, closure(store, [(DATA, None), (TRAINED, STEPS[-1])]))
    for each in (store, target):
        verified = verify(each)
        assert verified.damages == [] and verified.files > 0


class Place:
    """A filesystem and a folder on it; a store there, with faults or without, and its copy beside it."""

    def __init__(self, fs: Any, root: str, scratch: Path, task: Task = work) -> None:
        self.fs, self.root, self.scratch, self.task = fs, root, scratch, task

    @property
    def is_local(self) -> bool:
        return "file" in self.fs.protocol

    def work(self, faults: Faults) -> None:
        with (
            faults.on_disk() if self.is_local else nullcontext(),
            quick_to_give_up() if faults.kind == HANGS else nullcontext(),
        ):
            self.task(Store(faults.on(self.fs), self.root, piece_bytes=PART_BYTES // 3), self.scratch)

    def damaged(self) -> list[str]:
        return [path for root in self._roots() for path in damaged(like(self.fs), root)]

    def result(self) -> list[dict[str, Any]]:
        return [result(Store(like(self.fs), root)) for root in self._roots()]

    def _roots(self) -> list[str]:
        return [self.root] if self.task is work else [self.root, f"{self.root}-copy"]

    def clear(self) -> None:
        for root in filter(self.fs.exists, self._roots()):
            self.fs.rm(root, recursive=True)


@contextmanager
def quick_to_give_up() -> Iterator[None]:
    """The store waits half a second for an answer."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("APERTUS_STORE_TIMEOUT", "0.5")
        yield


def recorded(place: Place) -> tuple[Faults, list[dict[str, Any]]]:
    """A run without faults, for its calls, and what came out of it."""
    faults = Faults()
    place.work(faults)
    return faults, place.result()


def check(place: Place, faults: Faults, expected: list[dict[str, Any]]) -> None:
    """Work that a fault hits; then what it left, and the work again."""
    where = f"{faults.kind}, {'from' if faults.lasting else 'at'} call {faults.at}"
    try:
        place.work(faults)
    except (OSError, StoreError):  # what is tried again, and told
        pass
    except Exception as error:
        raise AssertionError(
            f"{where} {faults.calls[faults.at - 1 : faults.at]}: the work ends with {error!r}"
        ) from error
    finally:
        faults.let_go()
    where += f" {faults.calls[faults.at - 1 : faults.at]}"  # none where a clock has made fewer calls
    wrong = place.damaged()
    assert wrong == [], f"{where}: damaged: {wrong}"
    try:
        place.work(Faults())
        found = place.result()
    except Exception as error:
        raise AssertionError(f"{where}: the next run ends with {error!r}") from error
    assert found == expected, f"{where}: the next run ends with another result"


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits between two tries; the versions of libraries, which every manifest states, are looked
    up once; a file of a checkpoint has two parts."""
    monkeypatch.setattr("infra.store.files.sinks.PART_BYTES", PART_BYTES)
    monkeypatch.setattr("moto.s3.models.S3_UPLOAD_PART_MIN_SIZE", 1)
    monkeypatch.setattr("infra.store.storage.retry.time", SimpleNamespace(sleep=lambda seconds: None))
    monkeypatch.setattr(importlib.metadata, "version", functools.cache(importlib.metadata.version))


@pytest.fixture
def new_place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[..., Place]]:
    """Makes places on the kind of storage that the test is parametrised with: empty ones, or with the work
    done for another task."""
    with in_reach(request, request.param) as (fs, root):
        done = f"{root}/done"

        def make(task: Task = work) -> Place:
            place = Place(fs, f"{root}/{uuid.uuid4().hex}", tmp_path / "scratch", task)
            if task is not work:
                if not fs.exists(done):
                    work(Store(fs, done, piece_bytes=PART_BYTES // 3), place.scratch)
                fs.copy(done, place.root, recursive=True)
            return place

        yield make


@contextmanager
def in_reach(request: pytest.FixtureRequest, place: str) -> Iterator[tuple[Any, str]]:
    if place == "disk":
        # nobody cuts the power: no disk is needed
        with tempfile.TemporaryDirectory(dir=MEMORY if MEMORY.is_dir() else None) as folder:
            yield fsspec.filesystem("file"), folder
    elif place == "memory":
        yield fsspec.filesystem("memory"), f"/{uuid.uuid4().hex}"
    else:
        with request.getfixturevalue(place).in_environment() as bucket:
            yield fsspec.filesystem("s3"), bucket.removeprefix("s3://")


def kinds_on(place: Place) -> tuple[str, ...]:
    """Calls on a local disk have no bound: the kernel's is theirs."""
    return tuple(kind for kind in KINDS if kind != HANGS or not place.is_local)


def every_fault(run: Faults, kinds: Sequence[str]) -> list[Faults]:
    """Every kind at every call, once and from then on; what hangs from then on, and takes seven tries of
    half a second, at every sixth."""
    return [
        Faults(kind, at, lasting=lasting)
        for at in range(1, len(run.calls) + 1)
        for kind in kinds
        for lasting in (False, True)
        if not (lasting and kind == HANGS and at % 6)
    ]


def one_at_each(run: Faults, kinds: Sequence[str]) -> list[Faults]:
    """At every call one kind, so that the calls of one name have all kinds in turn."""
    turns = Counter[str]()
    found = []
    for at, name in enumerate(run.calls, start=1):
        found.append(Faults(kinds[turns[name] % len(kinds)], at))
        turns[name] += 1
    return found


def some_last(run: Faults, kinds: Sequence[str]) -> list[Faults]:
    """One at each call; from every sixth call on another one."""
    without = [kind for kind in kinds if kind != HANGS]  # seven tries of half a second
    lasting = [
        Faults(without[at // 6 % len(without)], at, lasting=True) for at in range(1, len(run.calls) + 1, 6)
    ]
    return one_at_each(run, kinds) + lasting


def at_sites(run: Faults, kinds: Sequence[str]) -> list[Faults]:
    """Of `one_at_each` one for each call site: what is done to the second unit, rank or step is done to
    the first."""
    first = {site: at for at, site in reversed([*enumerate(run.sites, start=1)])}
    return [faults for faults in one_at_each(run, kinds) if faults.at in first.values()]


def at_every_sixth_site(run: Faults, kinds: Sequence[str]) -> list[Faults]:
    return at_sites(run, kinds)[::6]


def at_the_other_sites(run: Faults, kinds: Sequence[str]) -> list[Faults]:
    return [faults for index, faults in enumerate(at_sites(run, kinds)) if index % 6]


def sites(run: Faults, kinds: Sequence[str]) -> list[Faults]:
    """`at_sites`, and those of `some_last` that last."""
    return at_sites(run, kinds) + [faults for faults in some_last(run, kinds) if faults.lasting]


def every_third_site(run: Faults, kinds: Sequence[str]) -> list[Faults]:
    return sites(run, kinds)[::3]


Choose = Callable[[Faults, Sequence[str]], list[Faults]]
SLOW = [pytest.mark.slow, pytest.mark.timeout(3600)]


@pytest.mark.parametrize(
    ("new_place", "task", "choose"),
    [
        ("disk", work, sites),
        ("memory", work, sites),
        ("disk", keep, every_third_site),
        *(
            pytest.param(place, task, choose, marks=SLOW)
            for place in ("disk", "memory")
            for task, choose in ((work, every_fault), (keep, some_last))
        ),
        pytest.param("moto", work, one_at_each, marks=SLOW),
        pytest.param("swift", work, at_sites, marks=SLOW),
        # its hundreds of calls take Swift seven seconds, each time, so the two share the sites
        pytest.param("moto", keep, at_the_other_sites, marks=SLOW),
        pytest.param("swift", keep, at_every_sixth_site, marks=SLOW),
    ],
    indirect=["new_place"],
)
def test_a_fault_at_any_call_costs_nothing_but_time(
    new_place: Callable[[Task], Place], task: Task, choose: Choose
) -> None:
    place = new_place(task)
    run, expected = recorded(place)
    assert len(run.calls) > 40
    check_all(functools.partial(new_place, task), choose(run, kinds_on(place)), expected)


@pytest.mark.slow
@pytest.mark.parametrize("new_place", ["moto", "swift"], indirect=True)
def test_two_faults_over_the_network_cost_nothing_but_time(new_place: Callable[[], Place]) -> None:
    """One hits a request of a multipart upload; calls take hundreds of times as long as in memory."""
    run, expected = recorded(new_place())
    random = Random(6)
    parts = [at for at, name in enumerate(run.calls, start=1) if name == "call_s3"]
    check_all(
        new_place, [Faults("503", random.choice(parts)), random.choice(every_fault(run, KINDS))], expected
    )


def check_all(new_place: Callable[[], Place], chosen: list[Faults], expected: list[dict[str, Any]]) -> None:
    """Tells all that is wrong, not the first of it."""
    wrong = []
    for faults in chosen:
        place = new_place()
        try:
            check(place, faults, expected)
        except AssertionError as error:
            wrong.append(str(error).splitlines()[0])
        place.clear()
    if wrong:
        pytest.fail("\n".join([f"{len(wrong)} of {len(chosen)} faults:", *wrong]), pytrace=False)
