"""Streams of tokens over shards, wherever they lie: the same samples, opened at a cost that does not grow."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import apertus_model.data.tokens.stream
from apertus_model.data.order.samples import MixtureSamples
from apertus_model.data.tokens.megatron import TokenFileError, TokenFileWriter
from apertus_model.data.tokens.stream import TokenShard, TokenStream, split_shards
from infra.store import Artifact, Attempt, Store, StoreError
from infra.store.reading.ranges import BlockCache, LocalFile
from specs.settings import Goldfish
from tests.apertus_model.mixtures import recipe_of, shards_of
from tests.jobs import job_at

VOCAB = 1000
RECIPE = recipe_of({"0": 1}, seed=3, vocab_size=VOCAB)


def _shards(folder: Path, count: int = 3) -> list[Path]:
    random = np.random.default_rng(7)
    for number in range(count):
        with TokenFileWriter(folder / f"train-{number:05d}", "<u2") as writer:
            for _ in range(9):
                writer.write([1, *random.integers(10, VOCAB, random.integers(1, 60)).tolist(), 2])
    return [folder / f"train-{number:05d}" for number in range(count)]


def _stored(folder: Path, url: str) -> Artifact:
    store = Store.open(url)
    store.initialise()
    attempt = Attempt(job_at("corpus/f", store, folder), store)
    shards = _shards(folder)
    for shard in shards:
        for suffix in (".bin", ".idx"):
            attempt.put(f"{shard}{suffix}", shard.name + suffix)
    attempt.commit(metrics={}, facts={"vocab_size": VOCAB, "train": [shard.name for shard in shards]})
    return attempt.artifact


def _bytes(samples: MixtureSamples, count: int = 40) -> list[list[bytes]]:
    return [[array.tobytes() for array in samples[i][:3]] for i in range(count)]


def _open(bins: Any) -> MixtureSamples:
    return MixtureSamples.open(RECIPE, [bins], sequence_length=16, goldfish=Goldfish(k=3, h=5))


@pytest.mark.parametrize("largest_copied", [0, 2**20])
def test_samples_of_a_remote_store_equal_those_of_local_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, largest_copied: int
) -> None:
    monkeypatch.setenv("APERTUS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(apertus_model.data.tokens.stream, "WHOLE_SPLIT_BYTES", largest_copied)
    corpus = _stored(tmp_path, f"memory://{tmp_path.name}")
    here = _open(shards_of([tmp_path / f"train-{number:05d}" for number in range(3)]))
    there = _open(split_shards(corpus, "train", BlockCache(tmp_path, block_bytes=64, capacity_bytes=256)))
    assert _bytes(there) == _bytes(here)
    assert _bytes(pickle.loads(pickle.dumps(there))) == _bytes(here)
    assert (tmp_path / "cache").exists() == (largest_copied > 0)


def test_opening_reads_nothing_whatever_the_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[tuple[str, int]] = []
    original = LocalFile.read

    def counted(self: LocalFile, start: int, stop: int) -> bytes:
        read.append((Path(self.name).name, stop - start))
        return original(self, start, stop)

    monkeypatch.setattr(LocalFile, "read", counted)
    shards = [(LocalFile(f"{path}.bin"), LocalFile(f"{path}.idx")) for path in _shards(tmp_path)]
    samples = _open([TokenShard(*files, np.dtype("<u2"), VOCAB) for files in shards])
    assert read == []
    _ = samples[0]
    assert {name for name, _ in read if name.endswith(".bin")} < {
        f"train-{number:05d}.bin" for number in range(3)
    }


def test_a_shard_is_checked_when_it_is_first_read(tmp_path: Path) -> None:
    shards = _shards(tmp_path)
    index = Path(f"{shards[1]}.idx")
    index.write_bytes(index.read_bytes()[:-8])
    stream = TokenStream(shards_of(shards, VOCAB))
    first = stream.read(0, 10)
    assert first[0] == 1
    with pytest.raises(
        TokenFileError, match=r"train-00001\.idx has \d+ bytes; 9 sequences and 10 document boundaries take"
    ):
        stream.read(len(stream) // 2, len(stream) // 2 + 5)


def test_shards_of_one_stream_have_tokens_of_one_type(tmp_path: Path) -> None:
    shards = _shards(tmp_path, 1)
    with TokenFileWriter(tmp_path / "other", "<i4") as writer:
        writer.write([1, 5, 2])
    stream = TokenStream(shards_of([*shards, tmp_path / "other"], VOCAB))
    with pytest.raises(TokenFileError, match=r"other\.idx has tokens of int32; uint16 was expected"):
        stream.read(len(stream) - 2, len(stream))


@pytest.mark.parametrize(
    ("dtype", "wrong", "vocab_size"),
    [("<u2", 1000, 1000), ("<i4", -1, 1000), ("<i2", -1, 100_000), ("<i8", 2**40, 9)],
)
def test_an_id_outside_of_the_vocabulary_is_named(
    tmp_path: Path, dtype: str, wrong: int, vocab_size: int
) -> None:
    from apertus_model.data.tokens.megatron import id_outside

    tokens = np.array([0, 5, wrong, 8], dtype)
    assert id_outside(tokens, vocab_size) == wrong
    assert id_outside(tokens[:2], vocab_size) is None
    if dtype == "<i4":
        with TokenFileWriter(tmp_path / "a", dtype) as writer:
            writer.write(tokens)
        (shard,) = shards_of([tmp_path / "a"], vocab_size)
        assert shard.read(0, 2).tolist() == [0, 5]
        with pytest.raises(
            TokenFileError, match=r"a\.bin holds token id -1 between tokens 1 and 4; the vocabulary has 1000"
        ):
            shard.read(1, 4)


def test_a_damaged_copy_of_a_small_split_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("APERTUS_CACHE", str(tmp_path / "cache"))
    corpus = _stored(tmp_path, f"memory://{tmp_path.name}")
    name = corpus.store.full(corpus.stored_name("train-00001.bin"))
    data = bytearray(corpus.store.fs.cat_file(name))
    data[0] ^= 1
    corpus.store.fs.pipe_file(name, bytes(data))
    stream = TokenStream(split_shards(corpus, "train", BlockCache(tmp_path)))
    with pytest.raises(StoreError, match=r"train-00001\.bin' is damaged"):
        stream.read(0, len(stream))


def test_a_missing_file_is_missed_at_once(tmp_path: Path) -> None:
    shards = _shards(tmp_path)
    Path(f"{shards[2]}.bin").unlink()
    with pytest.raises(FileNotFoundError, match=r"train-00002\.bin"):
        TokenStream(shards_of(shards, VOCAB))
