from __future__ import annotations

import itertools
import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from apertus_model.data.order.mixture_recipe import MixtureRecipe
from apertus_model.data.order.samples import MixtureSamples, ValidationSamples, positions_within_documents
from apertus_model.data.tokens.goldfish import goldfish_mask
from apertus_model.data.tokens.megatron import TokenFile, TokenFileWriter
from apertus_model.data.tokens.stream import IGNORE_INDEX, TokenShard, TokenStream
from infra.store.inputs import SourceError
from specs.settings import Goldfish
from tests.apertus_model.mixtures import recipe_of, shards_of

BOS, EOS, VOCAB = 1, 2, 1000
Shards = list[list[TokenShard]]


def _corpus(prefix: Path, seed: int, documents: int = 30) -> Path:
    rng = np.random.default_rng(seed)
    with TokenFileWriter(prefix, "<u2") as writer:
        for _ in range(documents):
            writer.write([BOS, *rng.integers(10, VOCAB, rng.integers(1, 40)).tolist(), EOS])
    return prefix


def _recipe(*weights: int, seed: int = 28) -> MixtureRecipe:
    by_name = {f"{index:032x}": weight for index, weight in enumerate(weights)}
    return recipe_of(by_name, seed=seed, vocab_size=VOCAB, eos_id=EOS)


@pytest.fixture
def bins(tmp_path: Path) -> Shards:
    return [shards_of([_corpus(tmp_path / "a", 1)]), shards_of([_corpus(tmp_path / "b", 2)])]


def test_an_epoch_covers_every_label_once(bins: Shards) -> None:
    samples = MixtureSamples.open(_recipe(1), bins[:1], sequence_length=16)
    stream = TokenStream(bins[0]).read(0, len(TokenStream(bins[0])))
    windows = (len(stream) - 1) // 16
    seen = sorted(tuple(samples[i].input) for i in range(windows))
    assert seen == sorted(tuple(stream[w * 16 : w * 16 + 16]) for w in range(windows))


def test_labels_are_the_next_tokens_but_nothing_is_predicted_from_an_end_of_document(
    bins: Shards,
) -> None:
    text = TokenStream(bins[0]).read(0, len(TokenStream(bins[0]))).tolist()
    samples = MixtureSamples.open(_recipe(1), bins[:1], sequence_length=16)
    for i in range(20):
        sample = samples[i]
        start = samples.order[i].window * 16
        expected = [IGNORE_INDEX if text[t] == EOS else text[t + 1] for t in range(start, start + 16)]
        assert sample.labels.tolist() == expected
        assert [array.dtype for array in sample[:3]] == [np.int64] * 3
    assert any(EOS in samples[i].labels for i in range(20))


def test_positions_restart_after_each_document() -> None:
    assert positions_within_documents(np.array([2, 4, 5]), 7).tolist() == [0, 1, 2, 0, 1, 0, 0]
    random = np.random.default_rng(3)
    for documents in (0, 1, 5, 14, 15, 16, 17, 40):
        ends = np.sort(random.choice(50, documents, replace=False))
        expected, position = [], 0
        for place in range(50):
            expected.append(position)
            position = 0 if place in ends else position + 1
        assert positions_within_documents(ends, 50).tolist() == expected


def test_goldfish_sees_the_true_ids_across_documents(bins: Shards) -> None:
    plain = MixtureSamples.open(_recipe(1), bins[:1], sequence_length=64)
    masked = MixtureSamples.open(_recipe(1), bins[:1], sequence_length=64, goldfish=Goldfish(k=3, h=5))
    stream = TokenStream(bins[0])
    dropped = 0
    for i in range(8):
        start = plain.order[i].window * 64
        mask = goldfish_mask(stream.read(start + 1, start + 65), 3, 5)
        assert masked[i].labels.tolist() == np.where(mask, IGNORE_INDEX, plain[i].labels).tolist()
        dropped += int(mask.sum())
    assert dropped


def test_goldfish_within_documents_gives_each_document_the_mask_that_it_has_alone(
    bins: Shards,
) -> None:
    plain = MixtureSamples.open(_recipe(1), bins[:1], sequence_length=64)
    masked = MixtureSamples.open(
        _recipe(1), bins[:1], sequence_length=64, goldfish=Goldfish(k=3, h=5, within_documents=True)
    )
    stream = TokenStream(bins[0])
    dropped = 0
    for i in range(8):
        start = plain.order[i].window * 64
        labels, expected = stream.read(start + 1, start + 65), plain[i].labels.copy()
        borders = [*np.flatnonzero(plain[i].positions == 0), 64]
        assert len(borders) > 2
        for begin, end in itertools.pairwise(borders):
            mask = goldfish_mask(labels[begin:end], 3, 5)
            expected[begin:end][mask] = IGNORE_INDEX
            dropped += int(mask.sum())
        assert masked[i].labels.tolist() == expected.tolist()
    assert dropped


def test_shards_read_like_one_file(tmp_path: Path) -> None:
    shards = [_corpus(tmp_path / f"shard-{n}", n, documents=7) for n in range(3)]
    TokenFileWriter(tmp_path / "empty", "<u2").close()
    whole = np.concatenate([TokenFile(shard).tokens for shard in shards])
    stream = TokenStream(shards_of([shards[0], tmp_path / "empty", *shards[1:]], VOCAB))
    assert len(stream) == len(whole)
    for start in range(0, len(whole) - 33, 5):
        assert stream.read(start, start + 33).tolist() == whole[start : start + 33].tolist()


def test_sources_are_mixed_by_their_weights(bins: Shards) -> None:
    samples = MixtureSamples.open(_recipe(3, 1), bins, sequence_length=16)
    assert [sum(samples[i].source == source for i in range(512)) for source in (0, 1)] == [384, 128]
    windows = [TokenStream(path).windows(16) for path in bins]
    assert samples.epochs(512) == pytest.approx([384 / windows[0], 128 / windows[1]])
    draws = [samples.order[i] for i in range(128)]
    expected = [(0, k) for k in range(96)] + [(1, k) for k in range(32)]
    assert sorted((draw.source, draw.draw) for draw in draws) == expected


def test_another_process_reads_the_same_bytes(bins: Shards) -> None:
    samples = MixtureSamples.open(_recipe(2, 1), bins, sequence_length=16, goldfish=Goldfish(k=3, h=5))
    program = (
        "import pickle, sys\n"
        "samples = pickle.load(sys.stdin.buffer)\n"
        "found = {i: [array.tobytes() for array in samples[i][:3]] for i in reversed(range(50))}\n"
        "sys.stdout.buffer.write(pickle.dumps(found))\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", program],
        input=pickle.dumps(samples),
        capture_output=True,
        check=True,
        timeout=60,
    )
    there = pickle.loads(run.stdout)
    assert [there[i] for i in range(50)] == [[array.tobytes() for array in samples[i][:3]] for i in range(50)]


def test_every_held_out_token_is_a_label_once(bins: Shards) -> None:
    samples = ValidationSamples(bins, eos_id=EOS, sequence_length=16)
    for source, path in enumerate(bins):
        stream = TokenStream(path).read(0, len(TokenStream(path)))
        labels = np.concatenate([samples[i].labels for i in samples.of_source(source)])
        inputs = np.concatenate([samples[i].input for i in samples.of_source(source)])
        expected = np.where(stream[:-1] == EOS, IGNORE_INDEX, stream[1:])
        assert labels[: expected.size].tolist() == expected.tolist()
        assert inputs[: expected.size].tolist() == stream[:-1].tolist()
        assert (labels[expected.size :] == IGNORE_INDEX).all()
    assert [sample.source for sample in samples] == sorted(sample.source for sample in samples)
    assert len(samples) == sum(len(samples.of_source(source)) for source in (0, 1))


def test_a_source_that_is_too_short_is_refused_with_its_numbers(tmp_path: Path, bins: Shards) -> None:
    tokens = len(TokenStream(bins[0]))
    with pytest.raises(
        SourceError, match=f"source 0 .* has {tokens} training tokens; .* length 5000 takes 5001"
    ):
        MixtureSamples.open(_recipe(1), bins[:1], sequence_length=5000)
