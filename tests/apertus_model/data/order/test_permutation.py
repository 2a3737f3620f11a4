from __future__ import annotations

import numpy as np
import pytest

from apertus_model.data.order.permutation import MAX_SIZE, KeyedPermutation


@pytest.mark.parametrize("n", [*range(1, 40), 1000, 4097])
def test_every_index_is_hit_exactly_once(n: int) -> None:
    permutation = KeyedPermutation(n, 28, "documents")
    assert sorted(permutation(i) for i in range(n)) == list(range(n))


@pytest.mark.parametrize("n", [1, 2, 37, 4096, 10**12 + 39, MAX_SIZE])
def test_the_array_form_agrees_with_the_scalar_one(n: int) -> None:
    permutation = KeyedPermutation(n, 3, "windows", 2)
    indices = np.unique(np.array([0, 1, n // 5, n // 2, n - 1]) % n).reshape(1, -1)
    assert permutation.array(indices).tolist() == [[permutation(int(i)) for i in indices[0]]]


def test_the_values_are_fixed_for_ever() -> None:
    # A change of these numbers changes the order of the data of every stored run.
    assert [KeyedPermutation(10, 28, "train")(i) for i in range(10)] == [9, 1, 5, 6, 3, 7, 0, 4, 8, 2]
    assert [KeyedPermutation(MAX_SIZE, 0)(i) for i in range(3)] == [
        267525529674983,
        159992972296768,
        121767564048333,
    ]


def test_keys_that_print_alike_are_different_keys() -> None:
    orders = {
        tuple(KeyedPermutation(100, *key).array(np.arange(100)))
        for key in [(1, 23), (12, 3), (123,), ("1", 23), ("123",)]
    }
    assert len(orders) == 5


def test_places_are_equally_likely_over_keys() -> None:
    n, keys = 8, 4000
    counts = np.zeros((n, n))
    for key in range(keys):
        counts[np.arange(n), KeyedPermutation(n, key).array(np.arange(n))] += 1
    chi_square = ((counts - keys / n) ** 2 / (keys / n)).sum(axis=1)
    # 99.99th percentile of chi-square with 7 degrees of freedom.
    assert chi_square.max() < 29.9


def test_neighbours_do_not_stay_neighbours() -> None:
    n = 100_000
    values = KeyedPermutation(n, 1).array(np.arange(n))
    assert abs(np.corrcoef(values[:-1], values[1:])[0, 1]) < 0.02


@pytest.mark.parametrize("n", [0, -1, MAX_SIZE + 1])
def test_impossible_sizes_are_refused(n: int) -> None:
    with pytest.raises(ValueError, match="between 1 and 2\\*\\*48"):
        KeyedPermutation(n)


def test_indices_outside_are_refused() -> None:
    permutation = KeyedPermutation(5, 1)
    for index in (-1, 5):
        with pytest.raises(IndexError):
            permutation(index)
        with pytest.raises(IndexError):
            permutation.array(np.array([0, index]))
