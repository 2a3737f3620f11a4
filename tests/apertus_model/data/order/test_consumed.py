"""What is consumed, and in which order, does not depend on ranks, kills and borders."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from apertus_model.data.order.mixture_recipe import MixtureRecipe
from apertus_model.data.order.samples import MixtureSamples
from apertus_model.data.tokens.megatron import TokenFileError, TokenFileWriter
from apertus_model.data.tokens.stream import TokenShard, split_shards
from apertus_model.trainer.loader import SampleLoader
from infra.store.documents import Manifest
from infra.store.reading.ranges import LocalFile
from infra.store.records import FileRecord
from tests.apertus_model.mixtures import recipe_of, shards_of

LENGTH, SOURCES = 8, {"a": 901, "b": 453, "c": 201}
MAIN, SECOND = {"a": 3, "b": 2}, {"a": 1, "b": 1, "c": 2}
Shards = dict[str, list[TokenShard]]


@pytest.fixture(scope="module")
def bins(tmp_path_factory: pytest.TempPathFactory) -> Shards:
    """Corpora of one document each, in which every token is unique: a sample is known by its first token."""
    folder, following = tmp_path_factory.mktemp("bins"), 10
    for name, size in SOURCES.items():
        with TokenFileWriter(folder / name, "<i4") as writer:
            writer.write(range(following, following + size))
        following += size
    return {name: shards_of([folder / name]) for name in SOURCES}


def _recipe(weights: dict[str, int], seed: int = 28) -> MixtureRecipe:
    return recipe_of(weights, seed=seed, vocab_size=131_072)


def _open(
    bins: Shards,
    weights: dict[str, int],
    excluded: list[tuple[dict[str, int], int]] = [],  # noqa: B006
) -> MixtureSamples:
    before = [(_recipe(other), n) for other, n in excluded]
    return MixtureSamples.open(
        _recipe(weights), [bins[name] for name in weights], sequence_length=LENGTH, excluded=before
    )


def _consume(
    samples: Any, offset: int, batch: int, first: int, last: int, ranks: int, micro: int
) -> list[list[int]]:
    """First tokens of the samples of steps first + 1 to last, step by step, put together from what each
    rank reads in its own loader."""
    per_step = batch // (ranks * micro)
    steps: list[list[list[list[int]]]] = [[[] for _ in range(per_step)] for _ in range(last - first)]
    for rank in range(ranks):
        loader = SampleLoader(
            SampleLoader.Config(samples=samples, first_sample=lambda step: offset + step * batch,
            global_batch_size=batch),
            dp_world_size=ranks, dp_rank=rank, local_batch_size=micro,
        )  # fmt: skip
        loader.seek(first)
        batches = iter(loader)
        for step in steps:
            for turn in step:
                turn.append(next(batches)[0]["input"][:, 0].tolist())
    return [[token for turn in step for share in turn for token in share] for step in steps]


@settings(max_examples=15)
@given(
    st.lists(
        st.tuples(st.integers(1, 4), st.sampled_from([(1, 1), (1, 8), (2, 2), (2, 4), (4, 1), (8, 1)])),
        min_size=1,
        max_size=5,
    )
)
def test_any_sequence_of_kills_and_numbers_of_ranks_sees_what_one_run_sees(
    bins: Shards, attempts: list[tuple[int, tuple[int, int]]]
) -> None:
    samples = _open(bins, MAIN)
    total = sum(steps for steps, _ in attempts)
    expected = _consume(samples, 5, 8, 0, total, 1, 8)
    found: list[list[int]] = []
    for steps, (ranks, micro) in attempts:
        found += _consume(_open(bins, MAIN), 5, 8, len(found), len(found) + steps, ranks, micro)
    assert found == expected
    assert [token for step in found for token in step] == [
        int(samples[5 + i].input[0]) for i in range(8 * total)
    ]


@settings(max_examples=40)
@given(st.integers(0, 90), st.integers(0, 60), st.integers(0, 40))
def test_phases_that_exclude_each_other_draw_every_window_once_before_any_again(
    bins: Shards, n: int, m: int, again: int
) -> None:
    first = [int(_open(bins, MAIN)[i].input[0]) for i in range(n)]
    second = [int(sample.input[0]) for sample in map(_open(bins, SECOND, [(MAIN, n)]).__getitem__, range(m))]
    # The first mixture comes back: its own counter goes on, behind what the second drew.
    third = [
        int(sample.input[0])
        for sample in map(_open(bins, MAIN, [(SECOND, m)]).__getitem__, range(n, n + again))
    ]
    seen = Counter(first + second + third)
    begin = 10
    for size in SOURCES.values():
        windows = (size - 1) // LENGTH
        counts = [seen[begin + window * LENGTH] for window in range(windows)]
        assert max(counts) - min(counts) <= 1
        begin += size


def test_without_exclusion_the_second_phase_repeats_what_the_first_has_seen(
    bins: Shards,
) -> None:
    first = {int(_open(bins, MAIN)[i].input[0]) for i in range(60)}
    plain = {int(_open(bins, SECOND)[i].input[0]) for i in range(60)}
    behind = {int(_open(bins, SECOND, [(MAIN, 60)])[i].input[0]) for i in range(60)}
    assert first & plain
    assert not first & behind


def test_samples_of_another_seed_cannot_be_excluded(bins: Shards) -> None:
    with pytest.raises(ValueError, match=r"a mixture of seed 29 cannot be excluded from one of seed 28"):
        MixtureSamples.open(
            _recipe(MAIN),
            [bins["a"], bins["b"]],
            sequence_length=LENGTH,
            excluded=[(_recipe(SECOND, seed=29), 5)],
        )


class Huge:
    """A corpus of 10,000 shards and 15T tokens with the interface of an artifact, of which one shard is
    there."""

    def __init__(self, folder: Path, there: str) -> None:
        self.folder, self.there, self.opened = folder, there, list[str]()
        shards = [f"train-{number:05d}" for number in range(10_000)]
        files = {
            f"{shard}{suffix}": FileRecord(size=size, sha256="0" * 64)
            for shard in shards
            for suffix, size in ((".bin", 4 * 1_500_000_000), (".idx", 62))
        }
        self.manifest = Manifest(
            attempt="a", files=files, metrics={}, facts={"train": shards, "vocab_size": 131_072}
        )

    def open(self, name: str) -> HugeFile:
        return HugeFile(self, name)


class HugeFile:
    """A file of it, which must not be read unless it is there."""

    remote = False

    def __init__(self, corpus: Huge, name: str) -> None:
        self.corpus, self.name, self.size = corpus, name, corpus.manifest.files[name].size

    def read(self, start: int, stop: int) -> bytes:
        assert self.name.startswith(self.corpus.there), f"{self.name} was opened"
        if self.name not in self.corpus.opened:
            self.corpus.opened.append(self.name)
        return LocalFile(self.corpus.folder / self.name).read(start, stop)


def test_opening_15_trillion_tokens_opens_no_file_and_a_sample_opens_its_own(tmp_path: Path) -> None:
    length = 4096
    probe = MixtureSamples.open(
        _recipe({"a": 1}), [split_shards(Huge(tmp_path, "none"), "train")], sequence_length=length
    )  # type: ignore[arg-type]
    i = 3_662_109_374 - 5  # near the end of the first pass
    window = probe.order[i].window
    shard, offset = divmod(window * length, 1_500_000_000)
    # The shard is there as a sparse file in which every token is 0.
    name = f"train-{shard:05d}"
    with TokenFileWriter(tmp_path / name, "<i4") as writer:
        writer._index.write(np.array([1_500_000_000], "<i4").tobytes())
        writer.documents = 1
    with (tmp_path / f"{name}.bin").open("r+b") as data:
        data.truncate(4 * 1_500_000_000)
        data.seek(4 * offset)
        data.write(np.arange(7, 7 + length + 1, dtype="<i4").tobytes())
    corpus = Huge(tmp_path, name)
    samples = MixtureSamples.open(_recipe({"a": 1}), [split_shards(corpus, "train")], sequence_length=length)  # type: ignore[arg-type]
    assert corpus.opened == []
    assert samples[i].labels.tolist() == list(range(8, 8 + length))
    assert corpus.opened == [f"{name}.idx", f"{name}.bin"]


def test_shard_that_differs_from_its_manifest_is_refused(tmp_path: Path) -> None:
    with TokenFileWriter(tmp_path / "train-00000", "<i4") as writer:
        writer.write(range(100))
    samples = MixtureSamples.open(
        _recipe({"a": 1}), [split_shards(Huge(tmp_path, "train-0"), "train")[:1]], sequence_length=8
    )  # type: ignore[arg-type]
    with pytest.raises(
        TokenFileError, match=r"train-00000\.bin has 6000000000 bytes; .* 1 sequences end at byte 400"
    ):
        samples[0]
