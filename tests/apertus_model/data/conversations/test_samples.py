from __future__ import annotations

import pickle
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

from apertus_model.chat.encoder import ChatEncoder
from apertus_model.data.conversations.samples import ConversationSamples, PackedSample, heldout
from apertus_model.data.conversations.stored import Conversation, ConversationShards
from apertus_model.data.tokens.megatron import TokenFileWriter
from apertus_model.data.tokens.stream import IGNORE_INDEX
from apertus_model.data.tokens.vocabulary import train
from apertus_model.model.model import model_config
from infra.store.documents import Manifest
from infra.store.inputs import SourceError
from specs.model import ModelSpec
from specs.stages.sft import InverseRl, SftLoss

PAD, VOCAB = 10, 400
NO, YES, TOOL = 0, 1, 2


class Folder:
    """A split that was written by hand, with the interface of an artifact."""

    def __init__(self, path: Path, tokens: list[list[int]], masks: list[list[int]]) -> None:
        path.mkdir(exist_ok=True)
        self.path = path
        self.manifest = Manifest(
            attempt="a", files={}, metrics={}, facts={"vocab_size": VOCAB, "train": ["t"]}
        )
        with TokenFileWriter(path / "t", "<u2") as writer:
            for ids in tokens:
                writer.write(ids)
        np.save(path / "t.mask.npy", np.concatenate([np.array(mask, dtype=np.uint8) for mask in masks]))
        (path / "t.jsonl").write_text(
            "".join(Conversation(str(number), []).to_json() + "\n" for number in range(len(tokens)))
        )

    def local(self, name: str) -> Path:
        return self.path / name


def _shards(path: Path, tokens: list[list[int]], masks: list[list[int]] | None = None) -> ConversationShards:
    masks = masks or [[NO, *[YES] * (len(ids) - 1)] for ids in tokens]
    return ConversationShards(Folder(path, tokens, masks), "train")  # type: ignore[arg-type]


def _many(path: Path, seed: int, count: int = 40) -> ConversationShards:
    rng = np.random.default_rng(seed)
    return _shards(path, [rng.integers(100, VOCAB, rng.integers(2, 20)).tolist() for _ in range(count)])


def _open(
    shards: list[ConversationShards], repeats: list[int | float] | None = None, **options: Any
) -> ConversationSamples:
    settings = {
        "sequence_length": 24,
        "seed": 28,
        "loss": SftLoss(),
        "packing": "best-fit",
        "longer": "drop",
        "pad_id": PAD,
    } | options
    return ConversationSamples(shards, repeats or [1] * len(shards), **settings)


def _lists(sample: PackedSample) -> list[Any]:
    return [None if array is None else array.tolist() for array in sample]


def test_row_is_exactly_its_conversations_and_padding(tmp_path: Path) -> None:
    shards = _shards(
        tmp_path, [[1, 20, 21, 22, 23, 24], [1, 30, 31]], [[NO, NO, YES, TOOL, YES, YES], [NO, NO, YES]]
    )
    expected_input = [1, 20, 21, 22, 23, 24, 1, 30, 31, PAD, PAD]
    positions = [0, 1, 2, 3, 4, 5, 0, 1, 2, 0, 1]
    plain = _open([shards], sequence_length=11)
    assert plain.rows == 1
    labels = [
        IGNORE_INDEX,
        21,
        IGNORE_INDEX,
        23,
        24,
        IGNORE_INDEX,
        IGNORE_INDEX,
        31,
        IGNORE_INDEX,
        IGNORE_INDEX,
        IGNORE_INDEX,
    ]
    assert _lists(plain[0]) == [expected_input, labels, positions, None, None]
    weighted = _open([shards], sequence_length=11, loss=SftLoss(prompt_weight=0.25))[0]
    labels = [20, 21, IGNORE_INDEX, 23, 24, IGNORE_INDEX, 30, 31, IGNORE_INDEX, IGNORE_INDEX, IGNORE_INDEX]
    weights = [0.25, 1, 0, 1, 1, 0, 0.25, 1, 0, 0, 0]
    assert _lists(weighted) == [expected_input, labels, positions, weights, None]
    assert [array.dtype for array in weighted if array is not None] == [np.int64] * 3 + [np.float32]


def test_an_epoch_has_every_conversation_as_often_as_it_is_repeated(tmp_path: Path) -> None:
    shards = [_many(tmp_path / "a", 1), _many(tmp_path / "b", 2, count=10)]
    samples = _open(shards, [1, 3])
    for epoch in range(3):
        seen = Counter(
            found for i in range(samples.rows) for found in samples.conversations(epoch * samples.rows + i)
        )
        assert seen == Counter(
            {(0, index): 1 for index in range(40)} | {(1, index): 3 for index in range(10)}
        )
    assert samples.epochs(2 * samples.rows) == [2.0, 6.0]
    for i in range(samples.rows):
        lengths = [int(shards[source].lengths[index]) for source, index in samples.conversations(i)]
        assert sum(lengths) <= 24
        whole = np.concatenate([shards[source].tokens(index) for source, index in samples.conversations(i)])
        assert samples[i].input.tolist() == whole.tolist() + [PAD] * (24 - whole.size)
        assert int((samples[i].labels != IGNORE_INDEX).sum()) == sum(lengths) - len(lengths)


def test_the_seed_and_the_epoch_order_the_rows_and_nothing_else(tmp_path: Path) -> None:
    shards = [_many(tmp_path / "a", 1)]

    def order(samples: ConversationSamples, epoch: int = 0) -> list[Any]:
        return [tuple(samples.conversations(epoch * samples.rows + i)) for i in range(samples.rows)]

    one, other = _open(shards), _open(shards, seed=29)
    assert sorted(order(one)) == sorted(order(other)) == sorted(order(one, 1))
    assert order(one) != order(other)
    assert order(one) != order(one, 1)


def test_samples_have_no_state(tmp_path: Path) -> None:
    samples = _open([_many(tmp_path / "a", 1)], loss=SftLoss(prompt_weight=0.5))
    forward = [_lists(samples[i]) for i in range(20)]
    elsewhere = pickle.loads(pickle.dumps(samples))
    assert [_lists(elsewhere[i]) for i in reversed(range(20))][::-1] == forward
    assert [
        _lists(_open([_many(tmp_path / "a", 1)], loss=SftLoss(prompt_weight=0.5))[i]) for i in range(20)
    ] == forward
    with pytest.raises(IndexError, match="sample -1"):
        samples[-1]


def test_conversations_that_are_too_long_are_dropped_or_cut(tmp_path: Path) -> None:
    long, late = list(range(100, 130)), list(range(200, 230))
    masks = [[NO, *[YES] * 29], [NO] * 29 + [YES], [NO, YES, YES]]
    shards = _shards(tmp_path, [long, late, [1, 2, 3]], masks)
    dropping, cutting = _open([shards]), _open([shards], longer="truncate")
    assert (dropping.dropped, cutting.dropped) == (2, 1)
    assert [dropping.conversations(i) for i in range(dropping.rows)] == [[(0, 2)]]
    cut = next(cutting[i] for i in range(cutting.rows) if (0, 0) in cutting.conversations(i))
    assert cut.input.tolist() == long[:24]
    assert cut.labels.tolist() == [*long[1:24], IGNORE_INDEX]
    with pytest.raises(SourceError, match=r"none of the 3 conversations fits into a sequence of 2 tokens"):
        _open([shards], sequence_length=2)


def test_held_out_rows_keep_the_stored_order(tmp_path: Path) -> None:
    shards = [
        _shards(tmp_path / "a", [[1, 2, 3], [4, 5], [6, 7, 8, 9], [9] * 7]),
        _shards(tmp_path / "b", [[10, 11]]),
    ]
    rows = heldout(shards, sequence_length=6, longer="drop", pad_id=0)
    assert [row.input.tolist() for row in rows] == [[1, 2, 3, 4, 5, 0], [6, 7, 8, 9, 10, 11]]
    assert [row.labels.tolist() for row in rows] == [
        [2, 3, IGNORE_INDEX, 5, IGNORE_INDEX, IGNORE_INDEX],
        [7, 8, 9, IGNORE_INDEX, 11, IGNORE_INDEX],
    ]
    assert heldout([], sequence_length=6, longer="drop", pad_id=0) == []


def test_a_fraction_gives_each_epoch_an_exact_number_and_each_conversation_its_turn(tmp_path: Path) -> None:
    shards = [_many(tmp_path / "a", 1, count=40), _many(tmp_path / "b", 2, count=9)]
    samples = _open(shards, [0.7, 1.5])
    seen: list[Counter[tuple[int, int]]] = []
    first = 0
    for epoch in range(7):
        rows = next(
            n for n in range(1, 99) if samples.epochs(first + n)[0] == pytest.approx(0.7 * (epoch + 1))
        )
        found = [one for i in range(first, first + rows) for one in samples.conversations(i)]
        # 40 x 0.7 and 9 x 1.5 = 13.5, rounded up
        assert Counter(source for source, _ in found) == {0: 28, 1: 14}
        assert max(Counter(found).values()) <= 2 and set(found) >= {(1, index) for index in range(9)}
        seen.append(Counter(found))
        first += rows
    assert seen[0] != seen[1]
    total = sum(seen, Counter())
    counts = [total[0, index] for index in range(40)]  # 7 x 28 = 4 x 40 + 36
    assert sorted(Counter(counts).items()) == [(4, 4), (5, 36)]
    # in any order, elsewhere, and from the middle
    order = [samples.conversations(i) for i in range(first)]
    fresh = _open(shards, [0.7, 1.5])
    assert [fresh.conversations(i) for i in reversed(range(first))][::-1] == order
    assert pickle.loads(pickle.dumps(samples)).conversations(first - 1) == order[-1]
    assert _lists(_open(shards, [0.7, 1.5])[first - 1]) == _lists(samples[first - 1])


@pytest.mark.parametrize(("times", "number"), [(0.07, 7), (0.29, 29), (1.15, 115), (0.005, 1), (2.0, 200)])
def test_counts_are_those_of_the_decimal_number(tmp_path: Path, times: float, number: int) -> None:
    shards = [_shards(tmp_path, [[1, 20, 21]] * 100)]
    assert _open(shards, [times], packing="none").rows == number


def test_repeats_that_round_to_nothing_are_refused(tmp_path: Path) -> None:
    shards = [_shards(tmp_path, [[1, 20, 21]] * 3)]
    with pytest.raises(
        SourceError, match=r"repeats 0\.1 of 3 conversations round to none\. Fix: raise the numbers"
    ):
        _open(shards, [0.1])


def test_without_packing_a_sequence_is_one_conversation_and_padding(tmp_path: Path) -> None:
    shards = [_many(tmp_path / "a", 1), _shards(tmp_path / "b", [list(range(100, 130)), [1, 2, 3]])]
    samples = _open(shards, [1, 2], packing="none")
    assert (samples.rows, samples.dropped) == (42, 1)
    seen = Counter(one for i in range(42) for one in samples.conversations(i))
    assert seen == {**{(0, index): 1 for index in range(40)}, (1, 1): 2}
    for i in range(42):
        ((source, index),) = samples.conversations(i)
        tokens = shards[source].tokens(index).tolist()
        left = 24 - len(tokens)
        assert _lists(samples[i]) == [
            tokens + [PAD] * left,
            tokens[1:] + [IGNORE_INDEX] * (left + 1),
            [*range(len(tokens)), *range(left)],
            *(None, None),
        ]
    cut = _open(shards, packing="none", longer="truncate")
    assert (cut.rows, cut.dropped) == (42, 0)
    with pytest.raises(SourceError, match="none of the 1 conversations fits into a sequence of 24 tokens"):
        _open([_shards(tmp_path / "c", [list(range(100, 130))])], packing="none")


def test_normalised_losses_weigh_labels_and_count_conversations(tmp_path: Path) -> None:
    tokens = [[1, 20, 21, 22, 23, 24], [1, 30, 31]]
    shards = _shards(tmp_path, tokens, [[NO, NO, YES, TOOL, YES, YES], [NO, NO, YES]])

    def row(**loss: Any) -> PackedSample:
        return _open([shards], sequence_length=11, loss=SftLoss(prompt_weight=0.5, **loss))[0]

    apart = row(length_normalised=True)
    assert apart.weights is not None and apart.counts is not None
    assert apart.counts.tolist() == [4, 2]
    assert apart.weights.T.tolist() == [
        [0, 1, 0, 1, 1, 0, 0, 1, 0, 0, 0],
        [0.5, 0, 0, 0, 0, 0, 0.5, 0, 0, 0, 0],
    ]
    means = row(average="conversations")
    expected = [0.5 / 3.5, 1 / 3.5, 0, 1 / 3.5, 1 / 3.5, 0, 0.5 / 1.5, 1 / 1.5, 0, 0, 0]
    assert means.weights is not None and means.weights[:, 0].tolist() == pytest.approx(expected, rel=1e-15)
    both = row(average="conversations", length_normalised=True)
    expected = [0.5, 1 / 3, 0, 1 / 3, 1 / 3, 0, 0.5, 1, 0, 0, 0]
    assert both.weights is not None and both.weights[:, 0].tolist() == pytest.approx(expected, rel=1e-15)
    assert [one.counts.tolist() for one in (means, both) if one.counts is not None] == [[2], [2]]
    value = row(inverse_rl=InverseRl())
    ends = (5, 8, 9, 10)  # the last token of each, and padding
    everything = [token for ids in tokens for token in [*ids[1:], IGNORE_INDEX]] + [IGNORE_INDEX] * 2
    assert value.labels.tolist() == everything
    assert [place for place in range(11) if value.labels[place] < 0] == list(ends)
    assert value.weights is not None and value.weights[:, 0].tolist() == [0.5, 1, 0, 1, 1, 0, 0.5, 1, 0, 0, 0]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train(["How warm is it? Warm. And tomorrow? Cold, they say."] * 3, VOCAB, 100)


def test_conversations_in_one_row_do_not_see_each_other(tmp_path: Path, tokenizer: Tokenizer) -> None:
    encoder = ChatEncoder(tokenizer)
    turns = [("How warm is it?", "Warm."), ("And tomorrow?", "Cold, they say."), ("Is it?", "It is.")]
    encoded = [
        encoder.encode([{"role": "user", "content": asked}, {"role": "assistant", "content": replied}])
        for asked, replied in turns
    ]
    shards = _shards(
        tmp_path, [item.tokens.tolist() for item in encoded], [item.mask.tolist() for item in encoded]
    )
    length = int(shards.lengths.sum()) + 5
    samples = _open([shards], sequence_length=length)
    assert samples.rows == 1
    spec = ModelSpec(
        dim=48,
        n_layers=2,
        n_heads=4,
        n_kv_heads=2,
        head_dim=12,
        ffn_dim=96,
        vocab_size=VOCAB + 112,
        init_std=0.3,
    )
    model = model_config(spec, sequence_length=length, attention="sdpa", seed=0).build()
    model.init_weights()
    model.eval()
    row, start = samples[0], 0
    with torch.no_grad():
        packed = model(torch.from_numpy(row.input)[None], torch.from_numpy(row.positions)[None])[0]
        for _, index in samples.conversations(0):
            tokens = torch.from_numpy(shards.tokens(index))
            alone = model(tokens[None], torch.arange(len(tokens))[None])[0]
            stop = start + len(tokens)
            torch.testing.assert_close(packed[start:stop], alone, rtol=0, atol=1e-5)
            trained = [
                int(token) for token, kind in zip(tokens, shards.mask(index), strict=True) if kind == YES
            ]
            assert [label for label in row.labels[start:stop].tolist() if label != IGNORE_INDEX] == trained
            start = stop
    # Each answer is trained from its first token to the end of the turn.
    labels = [label for label in row.labels.tolist() if label != IGNORE_INDEX]
    assert sorted(
        tokenizer.decode(labels, skip_special_tokens=False).split("<|assistant_end|>")[:-1]
    ) == sorted(replied for _, replied in turns)
