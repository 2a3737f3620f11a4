"""Storage that fails in any way, at any call: nothing that was committed is damaged, nothing else is read, the next run ends the work.

The work is that of two stages, as the launcher and the stages do it: one of units and files, one of checkpoints. It runs over a filesystem
that fails at its k-th call, for every k and every kind of fault. On S3 the files of checkpoints go up in parts.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import subprocess
import sys
import tempfile
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

from infra.store import Artifact, Attempt, Store, StoreError
from specs.job import Job
from tests.infra.committed import damaged
from tests.infra.faults import HANGS, KINDS, Faults, like

UNITS = ("task-0", "task-1")
STEPS = (10, 20, 30)
PART_BYTES = 768
MEMORY = Path("/dev/shm")
DATA, TRAINED = "corpus/" + "c" * 32, "pretrain/" + "f" * 32


def job(store: Store, scratch: Path, path: str, **fields: Any) -> Job:
    name = uuid.uuid4().hex[:8]
    kind, _, fingerprint = path.partition("/")
    return Job(
        node=kind, kind=kind, version=1, fingerprint=fingerprint, spec={}, identity={"seed": 1}, inputs={}, launch={}, store=store.url,
        path=path, attempt=name, scratch=str(scratch / name), progress=str(scratch / "progress"), **fields,
    )  # fmt: skip


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
    shard.write_bytes(b"".join(checked(attempt.store, unit["files"]["part.bin"]) for unit in units if unit))
    attempt.put(shard, "shard.bin")
    attempt.write_json("counts.json", {"documents": 6})
    attempt.commit(metrics={"documents": 6})


def checked(store: Store, record: dict[str, Any]) -> bytes:
    """A file of a unit, as stages read it."""
    data = store.read_bytes(record["path"])
    if hashlib.sha256(data).hexdigest() != record["sha256"]:
        raise StoreError(f"{record['path']} is damaged")
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
            artifact.verify_checkpoint(artifact.checkpoint(step))
            return step
        except StoreError:
            artifact.withdraw(step)
    return None


def result(store: Store) -> dict[str, Any]:
    """What was made, read as stages read it."""
    found = {name: hashlib.sha256(Artifact(store, DATA).bytes(name)).hexdigest() for name in ("shard.bin", "counts.json")}
    trained = Artifact(store, TRAINED, STEPS[-1])
    trained.verify_checkpoint(trained.checkpoint(STEPS[-1]))
    files = {Path(name).name: record["sha256"] for name, record in trained.manifest["files"].items()}
    return found | files | {"losses": [(row["step"], row["loss"]) for row in trained.history()]}


class Place:
    """A filesystem and a folder on it; a store there, with faults or without."""

    def __init__(self, fs: Any, root: str, scratch: Path) -> None:
        self.fs, self.root, self.scratch = fs, root, scratch

    @property
    def is_local(self) -> bool:
        return "file" in self.fs.protocol

    def work(self, faults: Faults) -> None:
        with faults.on_disk() if self.is_local else nullcontext(), quick_to_give_up() if faults.kind == HANGS else nullcontext():
            work(Store(faults.on(self.fs), self.root, piece_bytes=PART_BYTES // 3), self.scratch)

    def result(self) -> dict[str, Any]:
        return result(Store(like(self.fs), self.root))


@contextmanager
def quick_to_give_up() -> Iterator[None]:
    """The store waits half a second for an answer."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("APERTUS_STORE_TIMEOUT", "0.5")
        yield


def calls_of_the_work(place: Place) -> tuple[list[str], dict[str, Any]]:
    faults = Faults()
    place.work(faults)
    return faults.calls, place.result()


def check(place: Place, faults: Faults, expected: dict[str, Any]) -> None:
    """Work that a fault hits; then what it left, and the work again."""
    where = f"{faults.kind}, {'from' if faults.lasting else 'at'} call {faults.at}"
    try:
        place.work(faults)
    except (OSError, StoreError):  # what is tried again, and told
        pass
    except Exception as error:
        raise AssertionError(f"{where} ({faults.calls[faults.at - 1]}): the work ends with {error!r}") from error
    finally:
        faults.let_go()
    where += f" ({faults.calls[faults.at - 1]})"
    wrong = damaged(like(place.fs), place.root)
    assert wrong == [], f"{where}: damaged: {wrong}"
    try:
        place.work(Faults())
        found = place.result()
    except Exception as error:
        raise AssertionError(f"{where}: the next run ends with {error!r}") from error
    assert found == expected, f"{where}: the next run ends with another result"


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits between two tries; the versions of libraries, which every manifest states, are looked up once; a file of a checkpoint
    has two parts."""
    monkeypatch.setattr("infra.store.sinks.PART_BYTES", PART_BYTES)
    monkeypatch.setattr("moto.s3.models.S3_UPLOAD_PART_MIN_SIZE", 1)
    monkeypatch.setattr("infra.store.retry.time", SimpleNamespace(sleep=lambda seconds: None))
    monkeypatch.setattr(importlib.metadata, "version", functools.cache(importlib.metadata.version))


@pytest.fixture
def new_place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[[], Place]]:
    """Makes empty places on the kind of storage that the test is parametrised with."""
    made: list[Place] = []
    with in_reach(request, request.param) as (fs, root):

        def make() -> Place:
            made.append(Place(fs, f"{root}/{uuid.uuid4().hex}", tmp_path / "scratch"))
            return made[-1]

        yield make


@contextmanager
def in_reach(request: pytest.FixtureRequest, place: str) -> Iterator[tuple[Any, str]]:
    if place == "disk":
        with tempfile.TemporaryDirectory(dir=MEMORY if MEMORY.is_dir() else None) as folder:  # nobody cuts the power: no disk is needed
            yield fsspec.filesystem("file"), folder
    elif place == "memory":
        yield fsspec.filesystem("memory"), f"/{uuid.uuid4().hex}"
    else:
        with request.getfixturevalue(place).in_environment() as bucket:
            yield fsspec.filesystem("s3"), bucket.removeprefix("s3://")


def kinds_on(place: Place) -> tuple[str, ...]:
    """Calls on a local disk have no bound: the kernel's is theirs."""
    return tuple(kind for kind in KINDS if kind != HANGS or not place.is_local)


def every_fault(calls: list[str], kinds: Sequence[str]) -> list[Faults]:
    """Every kind at every call, once and from then on."""
    return [Faults(kind, at, lasting=lasting) for at in range(1, len(calls) + 1) for kind in kinds for lasting in (False, True)]


def some_faults(calls: list[str], kinds: Sequence[str]) -> list[Faults]:
    """At every call one kind, so that the calls of one name have all kinds in turn; from every sixth call on another one."""
    turns = Counter[str]()
    once = []
    for at, name in enumerate(calls, start=1):
        once.append(Faults(kinds[turns[name] % len(kinds)], at))
        turns[name] += 1
    without = [kind for kind in kinds if kind != HANGS]  # seven tries of half a second
    return once + [Faults(without[at // 6 % len(without)], at, lasting=True) for at in range(1, len(calls) + 1, 6)]


@pytest.mark.parametrize("choose", [some_faults, pytest.param(every_fault, marks=[pytest.mark.slow, pytest.mark.timeout(3600)])])
@pytest.mark.parametrize("new_place", ["disk", "memory"], indirect=True)
def test_a_fault_at_any_call_costs_nothing_but_time(
    new_place: Callable[[], Place], choose: Callable[[list[str], Sequence[str]], list[Faults]]
) -> None:
    place = new_place()
    calls, expected = calls_of_the_work(place)
    assert len(calls) > 40
    check_all(new_place, choose(calls, kinds_on(place)), expected)


@pytest.mark.parametrize("number", [2, pytest.param(500, marks=[pytest.mark.slow, pytest.mark.timeout(3600)])])
@pytest.mark.parametrize("new_place", ["moto", "swift"], indirect=True)
def test_a_fault_over_the_network_costs_nothing_but_time(new_place: Callable[[], Place], number: int) -> None:
    """Faults drawn at random, a request of a multipart upload always among those hit; calls take hundreds of times as long as in memory."""
    place = new_place()
    calls, expected = calls_of_the_work(place)
    random = Random(6)
    parts = [at for at, name in enumerate(calls, start=1) if name == "call_s3"]
    others = random.sample(every_fault(calls, KINDS), number - 1)
    check_all(new_place, [Faults("503", random.choice(parts)), *others], expected)


def check_all(new_place: Callable[[], Place], chosen: list[Faults], expected: dict[str, Any]) -> None:
    """Tells all that is wrong, not the first of it."""
    wrong = []
    for faults in chosen:
        place = new_place()
        try:
            check(place, faults, expected)
        except AssertionError as error:
            wrong.append(str(error).splitlines()[0])
        place.fs.rm(place.root, recursive=True)
    if wrong:
        pytest.fail("\n".join([f"{len(wrong)} of {len(chosen)} faults:", *wrong]), pytrace=False)


FULL_DISK = """
import resource, sys, time
from pathlib import Path
from infra.store import Store
from tests.infra.test_faults import work
time.sleep = lambda seconds: None
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]), resource.RLIM_INFINITY))
try:
    work(Store.open(sys.argv[1]), Path(sys.argv[3]))
except OSError as error:
    sys.exit(f"refused: {error}")
"""


@pytest.mark.parametrize("limit", [0, 1300])
def test_a_disk_that_takes_no_more_leaves_what_is_committed(tmp_path: Path, limit: int) -> None:
    """The system's own refusal, by a limit on the length of files, which needs no rights: a write is cut in the middle. The shorter limit
    is met by the first marker, the longer one by a file of a checkpoint."""
    store, sound = tmp_path / "store", tmp_path / "sound"
    command = [sys.executable, "-c", FULL_DISK, str(store), str(limit), str(tmp_path / "scratch")]
    ended = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True)
    assert ended.returncode == 1 and "refused: " in ended.stderr, ended.stderr
    place = Place(fsspec.filesystem("file"), str(store), tmp_path / "scratch")
    assert damaged(place.fs, place.root) == []
    place.work(Faults())
    uncut = Place(place.fs, str(sound), tmp_path / "scratch")
    uncut.work(Faults())
    assert place.result() == uncut.result()
