"""Parts of stored files: the right bytes, few requests, bounded room, and no silent damage."""

from __future__ import annotations

import errno
import hashlib
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random
from typing import Any

import pytest

from infra.store import Artifact, Attempt, StorageError, Store, StoreError
from infra.store.files.reader import OPEN_FILES
from infra.store.reading.ranges import BlockCache, LocalFile, StoredFile
from infra.store.records import sidecar_path
from infra.store.storage.retry import Retry
from tests.jobs import job_at

DATA = Random(5).randbytes(1000)
PIECE = 64


class Requests:
    """Counts what is asked of a filesystem."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, store: Store) -> None:
        self.ranges: list[tuple[int, int]] = []
        cat_file = store.fs.cat_file

        def counted(path: str, start: int | None = None, end: int | None = None, **options: Any) -> bytes:
            if start is not None and end is not None and not path.endswith(".pieces"):
                self.ranges.append((start, end))
            data: bytes = cat_file(path, start=start, end=end, **options)
            return data

        monkeypatch.setattr(store.fs, "cat_file", counted)


def artifact(url: str, folder: Path) -> Artifact:
    opened = Store.open(url)
    store = Store(opened.fs, opened.root, piece_bytes=PIECE)
    store.initialise()
    attempt = Attempt(job_at("corpus/f", store, folder), store)
    attempt.write_bytes("a.bin", DATA)
    attempt.commit(metrics={})
    return attempt.artifact


@pytest.fixture
def stored(tmp_path: Path) -> Artifact:
    return artifact(f"memory://{tmp_path.name}", tmp_path)


@pytest.mark.parametrize("pieces", [1, 3, 100])
def test_any_part_is_that_of_the_file_whatever_the_cache_holds(
    stored: Artifact, tmp_path: Path, pieces: int
) -> None:
    cache = BlockCache(tmp_path / "pieces", block_bytes=PIECE, capacity_bytes=PIECE * pieces)
    file = StoredFile(stored, "a.bin", cache)
    random = Random(1)
    for _ in range(200):
        start, stop = sorted(random.choices(range(1001), k=2))
        assert file.read(start, stop) == DATA[start:stop]
        assert len(cache) <= pieces
    assert os.fstat(cache._file.fileno()).st_size <= PIECE * pieces


def test_opening_asks_for_nothing_and_a_piece_is_fetched_once(
    stored: Artifact, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert stored.manifest.files["a.bin"].piece_bytes == PIECE
    requests = Requests(monkeypatch, stored.store)
    file = StoredFile(stored, "a.bin", BlockCache(tmp_path, block_bytes=PIECE, capacity_bytes=1000))
    assert (file.size, requests.ranges) == (1000, [])
    file.read(70, 80)
    file.read(127, 128)
    assert requests.ranges == [(64, 128)]
    file.read(70, 300)
    assert requests.ranges[1:] == [(128, 320)]
    file.read(970, 1000)
    assert requests.ranges[2:] == [(960, 1000)]


def test_the_least_recently_used_piece_goes_first(
    stored: Artifact, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = Requests(monkeypatch, stored.store)
    file = StoredFile(stored, "a.bin", BlockCache(tmp_path, block_bytes=PIECE, capacity_bytes=2 * PIECE))
    for start in (0, 64, 0, 128, 0, 64):
        file.read(start, start + 10)
    assert requests.ranges == [(0, 64), (64, 128), (128, 192), (64, 128)]


def test_the_cache_leaves_nothing_in_its_folder(stored: Artifact, tmp_path: Path) -> None:
    StoredFile(stored, "a.bin", BlockCache(tmp_path / "blocks", block_bytes=PIECE)).read(0, 1000)
    assert list((tmp_path / "blocks").iterdir()) == []


def test_a_full_disk_makes_the_cache_smaller_and_nothing_else(
    stored: Artifact, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pwrite = os.pwrite

    def full(number: int, data: bytes, offset: int) -> int:
        if offset >= 2 * PIECE:
            raise OSError(errno.ENOSPC, "full")
        return pwrite(number, data, offset)

    monkeypatch.setattr(os, "pwrite", full)
    cache = BlockCache(tmp_path, block_bytes=PIECE)
    file = StoredFile(stored, "a.bin", cache)
    for start in [*range(0, 1000, 50), *range(0, 1000, 50)]:
        assert file.read(start, start + 50) == DATA[start : start + 50]
    assert len(cache) == 2


def test_a_piece_that_cannot_be_replaced_costs_its_room_and_no_other_piece(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache, pwrite = BlockCache(tmp_path, block_bytes=4, capacity_bytes=8), os.pwrite

    def broken(number: int, data: bytes, offset: int) -> int:
        if data == b"cccc":
            raise OSError(errno.EIO, "injected")
        return pwrite(number, data, offset)

    monkeypatch.setattr(os, "pwrite", broken)
    for piece, data in enumerate([b"aaaa", b"bbbb", b"cccc"]):
        cache.put("f", piece, data)
    assert [cache.get("f", piece, 0, 4) for piece in range(3)] == [None, b"bbbb", None]
    cache.put("f", 3, b"dddd")
    assert [cache.get("f", piece, 0, 4) for piece in range(4)] == [None, None, None, b"dddd"]


@pytest.mark.parametrize("place", ["file", "memory"])
def test_only_the_damaged_piece_of_a_file_is_refused(tmp_path: Path, place: str) -> None:
    stored = artifact(str(tmp_path / "store") if place == "file" else f"memory://{tmp_path.name}", tmp_path)
    changed = bytearray(DATA)
    changed[500] ^= 1
    stored.store.fs.pipe_file(stored.store.full(stored.stored_name("a.bin")), bytes(changed))
    file = StoredFile(stored, "a.bin", BlockCache(tmp_path, block_bytes=PIECE))
    assert file.read(0, 448) == DATA[:448]
    assert file.read(512, 1000) == DATA[512:]
    with pytest.raises(StoreError, match=r"a\.bin' is damaged: piece 7 of 16 \(bytes 448 to 512\) differs"):
        file.read(440, 450)


def test_digests_of_pieces_that_were_changed_are_refused(stored: Artifact, tmp_path: Path) -> None:
    sidecar = sidecar_path(stored.stored_name("a.bin"))
    digests = stored.store.read_bytes(sidecar)
    assert digests == b"".join(
        hashlib.sha256(DATA[start : start + PIECE]).digest() for start in range(0, 1000, PIECE)
    )
    stored.store.fs.pipe_file(stored.store.full(sidecar), digests[:-1] + b"?")
    with pytest.raises(StoreError, match=r"\.a\.bin\.pieces' is damaged"):
        StoredFile(stored, "a.bin", BlockCache(tmp_path, block_bytes=PIECE)).read(0, 10)


def test_a_piece_on_local_disk_is_read_and_checked_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored = artifact(str(tmp_path / "store"), tmp_path)
    requests = Requests(monkeypatch, stored.store)
    for file in (StoredFile(stored, "a.bin", None), StoredFile(stored, "a.bin", None)):
        for start in (70, 100, 130):
            assert file.read(start, start + 20) == DATA[start : start + 20]
    assert requests.ranges == [(64, 128), (128, 192)]


def test_a_file_that_became_shorter_is_damage(stored: Artifact, tmp_path: Path) -> None:
    stored.store.fs.pipe_file(stored.store.full(stored.stored_name("a.bin")), DATA[:-1])
    with pytest.raises(StoreError, match="has 999 bytes of it, of which 1000 are needed"):
        StoredFile(stored, "a.bin", BlockCache(tmp_path)).read(990, 995)


def test_a_file_that_is_gone_is_named(stored: Artifact, tmp_path: Path) -> None:
    file = StoredFile(stored, "a.bin", BlockCache(tmp_path, block_bytes=PIECE))
    file.read(0, 10)
    stored.store.fs.rm(stored.store.full(stored.stored_name("a.bin")))
    with pytest.raises(StoreError, match=r"a\.bin' is not in the store"):
        file.read(500, 510)


def test_an_answer_of_the_wrong_length_is_asked_for_again(
    stored: Artifact, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, cat_file, answers = stored.store, stored.store.fs.cat_file, [DATA[64:127], DATA[64:129]]
    store.retry = Retry(sleep=lambda seconds: None)
    file = StoredFile(stored, "a.bin", BlockCache(tmp_path, block_bytes=PIECE))
    file.read(0, 10)
    monkeypatch.setattr(
        store.fs,
        "cat_file",
        lambda path, start, end: (
            answers.pop() if answers and start == 64 else cat_file(path, start=start, end=end)
        ),
    )
    assert file.read(70, 80) == DATA[70:80]
    assert not answers
    monkeypatch.setattr(store.fs, "cat_file", lambda path, start, end: DATA[start : end - 1])
    with pytest.raises(
        StorageError, match=r"failed 7 times: reading .*a\.bin.* gave 63 bytes of .*a\.bin' for 128 to 192"
    ):
        file.read(150, 160)


def test_a_bit_that_was_flipped_on_the_way_is_no_damage(
    stored: Artifact, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cat_file, answers = stored.store.fs.cat_file, [b"x" * PIECE]
    file = StoredFile(stored, "a.bin", BlockCache(tmp_path, block_bytes=PIECE))
    file.read(0, 10)
    monkeypatch.setattr(
        stored.store.fs,
        "cat_file",
        lambda path, start, end: answers.pop() if answers else cat_file(path, start=start, end=end),
    )
    assert file.read(70, 80) == DATA[70:80]


@pytest.mark.parametrize("place", ["file", "memory"])
def test_a_file_that_is_read_whole_is_checked_by_its_digest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    monkeypatch.setenv("APERTUS_CACHE", str(tmp_path / "cache"))
    whole = artifact(str(tmp_path / "store") if place == "file" else f"memory://{tmp_path.name}", tmp_path)
    assert StoredFile(whole, "a.bin", None).read(10, 20) == DATA[10:20]
    if place == "file":
        whole.store.fs.pipe_file(whole.store.full(whole.stored_name("a.bin")), DATA[:-1] + b"?")
        assert StoredFile(whole, "a.bin", None).read(10, 20) == DATA[10:20]
        with pytest.raises(StoreError, match=r"a\.bin' is damaged"):
            whole.local("a.bin")


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
