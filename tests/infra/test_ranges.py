"""Parts of stored files: the right bytes, few requests, bounded room, and no silent damage."""

from __future__ import annotations

import errno
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random
from typing import Any

import pytest

from infra.store import Artifact, Attempt, Store, StoreError
from infra.store.ranges import OPEN_FILES, BlockCache, LocalFile, StoredFile
from specs.job import Job

DATA = Random(5).randbytes(1000)


class Requests:
    """Counts what is asked of a filesystem."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, store: Store) -> None:
        self.ranges: list[tuple[int, int]] = []
        cat_file = store.fs.cat_file

        def counted(path: str, start: int | None = None, end: int | None = None, **options: Any) -> bytes:
            if start is not None and end is not None:
                self.ranges.append((start, end))
            data: bytes = cat_file(path, start=start, end=end, **options)
            return data

        monkeypatch.setattr(store.fs, "cat_file", counted)


def artifact(url: str, folder: Path) -> Artifact:
    store = Store.open(url)
    store.initialise()
    job = Job(
        node="c", kind="corpus", version=1, fingerprint="f", spec={}, identity={}, inputs={}, launch={}, store=url, path="corpus/f",
        attempt="first", scratch=str(folder / "scratch"), progress=str(folder / "progress"),
    )  # fmt: skip
    attempt = Attempt(job, store)
    attempt.write_bytes("a.bin", DATA)
    attempt.commit(metrics={})
    return Artifact(store, job.path)


@pytest.fixture
def stored(tmp_path: Path) -> Artifact:
    return artifact(f"memory://{tmp_path.name}", tmp_path)


@pytest.mark.parametrize("blocks", [1, 3, 100])
def test_any_part_is_that_of_the_file_whatever_the_cache_holds(stored: Artifact, tmp_path: Path, blocks: int) -> None:
    cache = BlockCache(tmp_path / "blocks", block_bytes=64, capacity_bytes=64 * blocks)
    file = StoredFile(stored, "a.bin", cache)
    random = Random(1)
    for _ in range(200):
        start, stop = sorted(random.choices(range(1001), k=2))
        assert file.read(start, stop) == DATA[start:stop]
        assert len(cache) <= blocks
    assert os.fstat(cache._file.fileno()).st_size <= 64 * blocks


def test_opening_asks_for_nothing_and_a_block_is_fetched_once(stored: Artifact, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    requests = Requests(monkeypatch, stored.store)
    file = StoredFile(stored, "a.bin", BlockCache(tmp_path, block_bytes=100, capacity_bytes=1000))
    assert (file.size, requests.ranges) == (1000, [])
    file.read(150, 160)
    file.read(199, 200)
    assert requests.ranges == [(100, 200)]
    file.read(150, 450)
    assert requests.ranges[1:] == [(200, 500)]
    file.read(950, 1000)
    assert requests.ranges[2:] == [(900, 1000)]


def test_the_least_recently_used_block_goes_first(stored: Artifact, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    requests = Requests(monkeypatch, stored.store)
    file = StoredFile(stored, "a.bin", BlockCache(tmp_path, block_bytes=100, capacity_bytes=200))
    for start in (0, 100, 0, 200, 0, 100):
        file.read(start, start + 10)
    assert requests.ranges == [(0, 100), (100, 200), (200, 300), (100, 200)]


def test_the_cache_leaves_nothing_in_its_folder(stored: Artifact, tmp_path: Path) -> None:
    StoredFile(stored, "a.bin", BlockCache(tmp_path / "blocks", block_bytes=100)).read(0, 1000)
    assert list((tmp_path / "blocks").iterdir()) == []


def test_a_full_disk_makes_the_cache_smaller_and_nothing_else(stored: Artifact, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pwrite = os.pwrite

    def full(number: int, data: bytes, offset: int) -> int:
        if offset >= 200:
            raise OSError(errno.ENOSPC, "full")
        return pwrite(number, data, offset)

    monkeypatch.setattr(os, "pwrite", full)
    cache = BlockCache(tmp_path, block_bytes=100)
    file = StoredFile(stored, "a.bin", cache)
    for start in [*range(0, 1000, 50), *range(0, 1000, 50)]:
        assert file.read(start, start + 50) == DATA[start : start + 50]
    assert len(cache) == 2


def test_another_size_than_the_manifest_states_is_damage(stored: Artifact, tmp_path: Path) -> None:
    stored.store.fs.pipe_file(stored.store.full(stored.stored_name("a.bin")), DATA + b"!")
    with pytest.raises(StoreError, match="has 1001 bytes, the manifest states 1000"):
        StoredFile(stored, "a.bin", BlockCache(tmp_path)).read(0, 10)


def test_a_file_that_is_gone_is_named(stored: Artifact, tmp_path: Path) -> None:
    file = StoredFile(stored, "a.bin", BlockCache(tmp_path, block_bytes=100))
    file.read(0, 10)
    stored.store.fs.rm(stored.store.full(stored.stored_name("a.bin")))
    with pytest.raises(StoreError, match=r"a\.bin' is not in the store"):
        file.read(500, 510)


def test_an_answer_that_is_too_short_is_an_error(stored: Artifact, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = StoredFile(stored, "a.bin", BlockCache(tmp_path, block_bytes=100))
    file.read(0, 10)
    monkeypatch.setattr(stored.store.fs, "cat_file", lambda path, start, end: DATA[start : end - 1])
    with pytest.raises(StoreError, match=r"gave 99 bytes of .*a\.bin' for 100 to 200"):
        file.read(150, 160)


@pytest.mark.parametrize("place", ["file", "memory"])
def test_a_file_that_is_read_whole_is_checked_by_its_digest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    monkeypatch.setenv("APERTUS_CACHE", str(tmp_path / "cache"))
    whole = artifact(str(tmp_path / "store") if place == "file" else f"memory://{tmp_path.name}", tmp_path)
    assert StoredFile(whole, "a.bin", None).read(10, 20) == DATA[10:20]
    if place == "file":
        whole.store.fs.pipe_file(whole.store.full(whole.stored_name("a.bin")), DATA[:-1] + b"?")
        with pytest.raises(StoreError, match=r"a\.bin' is damaged"):
            StoredFile(whole, "a.bin", None).read(10, 20)


def test_a_local_file_that_became_shorter_is_an_error_and_not_a_crash(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(DATA)
    file = LocalFile(tmp_path / "a")
    os.truncate(tmp_path / "a", 500)
    assert file.read(490, 500) == DATA[490:500]
    with pytest.raises(StoreError, match="ends at byte 500; it had 1000 bytes"):
        file.read(490, 510)


def test_threads_read_the_right_one_of_more_files_than_are_kept_open(tmp_path: Path) -> None:
    count = OPEN_FILES + 40
    for number in range(count):
        (tmp_path / str(number)).write_bytes(number.to_bytes(4, "little") * 10)
    files = [LocalFile(tmp_path / str(number)) for number in range(count)]
    asked = [Random(seed).randrange(count) for seed in range(4000)]
    before = len(os.listdir("/proc/self/fd"))
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda number: int.from_bytes(files[number].read(8, 12), "little"), asked))
    assert found == asked
    assert len(os.listdir("/proc/self/fd")) - before <= OPEN_FILES
