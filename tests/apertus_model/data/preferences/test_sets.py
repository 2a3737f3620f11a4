from __future__ import annotations

from collections import Counter
from fractions import Fraction

import numpy as np
import pytest

from apertus_model.data.order.permutation import KeyedPermutation
from apertus_model.data.preferences.samples import PreferenceSamples, PreferenceSets
from specs.errors import StageError


def rows(first: int, count: int, pairs: int = 1) -> PreferenceSamples:
    """Rows of `pairs` pairs each; a token says of which pair it is, from `first` on."""
    tokens = [first + number for number in range(count * pairs) for _ in range(4)]
    arrays = {
        "tokens": np.array(tokens, np.int32),
        "lengths": np.full(2 * count * pairs, 2),
        "prompt_lengths": np.ones(2 * count * pairs, np.int64),
        "rewards": np.zeros(2 * count * pairs, np.float32),
    }
    return PreferenceSamples(arrays, None, sequence_length=4 * pairs, pad_id=0)


def order(samples: PreferenceSets, epochs: int) -> list[int]:
    """The first token of each sample."""
    return [int(samples[i].input[0]) for i in range(epochs * samples.rows)]


def test_one_set_is_permuted_in_every_epoch() -> None:
    samples = PreferenceSets([rows(0, 20)], [Fraction(1)], seed=1)
    found = order(samples, 2)
    assert found == [
        KeyedPermutation(20, 1, epoch, "preference rows")(place) for epoch in (0, 1) for place in range(20)
    ]
    assert found[:20] != found[20:] and sorted(found[:20]) == sorted(found[20:]) == list(range(20))
    assert found[:20] != order(PreferenceSets([rows(0, 20)], [Fraction(1)], seed=2), 1)
    assert samples.epochs(60) == [3.0]


def test_sets_are_seen_as_often_as_their_repeats_say() -> None:
    sets = [rows(0, 10), rows(100, 4), rows(200, 6)]
    samples = PreferenceSets(sets, [Fraction(1), Fraction(3), Fraction("0.5")], seed=1)
    assert samples.rows == 10 + 12 + 3
    first, second = (Counter(order(samples, 2)[begin : begin + 25]) for begin in (0, 25))
    assert {token: first[token] for token in range(10)} == dict.fromkeys(range(10), 1)
    assert {token: second[token] for token in range(100, 104)} == dict.fromkeys(range(100, 104), 3)
    halves = [{token for token in counts if token >= 200} for counts in (first, second)]
    assert len(halves[0]) == 3 and halves[0] | halves[1] == set(range(200, 206))
    assert samples.epochs(50) == [2.0, 6.0, 1.0]
    assert samples.place(0)[0] in (0, 1, 2)
    with pytest.raises(IndexError):
        samples.place(-1)


def test_samples_of_all_sets_have_arrays_of_one_size() -> None:
    samples = PreferenceSets([rows(0, 3), rows(100, 3, pairs=3)], [Fraction(1)] * 2, seed=1)
    assert {samples[i].present.size for i in range(samples.rows)} == {6}
    assert {int(samples[i].present.sum()) for i in range(samples.rows)} == {2, 6}


def test_a_row_without_a_kept_pair_is_never_drawn() -> None:
    first, second = rows(0, 6), rows(100, 6)
    second.keep(np.arange(6) >= 4)
    samples = PreferenceSets([first, second], [Fraction(1)] * 2, seed=1)
    assert sorted(order(samples, 1)) == [*range(6), 104, 105]
    second.keep(np.zeros(6, np.bool_))
    with pytest.raises(StageError, match="no pair is left to train on"):
        PreferenceSets([second], [Fraction(1)], seed=1)
