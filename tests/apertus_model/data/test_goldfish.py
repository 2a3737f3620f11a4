from __future__ import annotations

import numpy as np
import pytest
import torch

from apertus_model.data.goldfish import TABLE_SEED, TABLE_SIZE, goldfish_mask, hash_table, window_products


def test_the_table_is_the_one_that_torch_draws() -> None:
    generator = torch.Generator().manual_seed(TABLE_SEED)
    expected = torch.rand(TABLE_SIZE, generator=generator)
    assert np.array_equal(hash_table() / 2**24, expected.double().numpy())


def _literal_mask(labels: list[int], k: int, h: int) -> list[bool]:
    """The published rule, label by label, in Python integers."""
    table = hash_table()
    mask = []
    for i in range(len(labels)):
        if i < h - 1:
            mask.append(False)
            continue
        product = 1
        for label in labels[i - h + 1 : i + 1]:
            product = (product * label) % 2**64
        signed = product - 2**64 if product >= 2**63 else product
        mask.append(bool(table[signed % TABLE_SIZE] / 2**24 < 1 / k))
    return mask


@pytest.mark.parametrize(("k", "h"), [(50, 50), (4, 13), (3, 1), (2, 4), (7, 64)])
def test_the_mask_is_the_published_rule(k: int, h: int) -> None:
    labels = np.random.default_rng(0).integers(1, 131_072, size=(2, 300)) | 1
    mask = goldfish_mask(labels, k, h)
    assert mask.tolist() == [_literal_mask(row.tolist(), k, h) for row in labels]
    assert mask.any()


def test_the_mask_is_the_reference_computation_in_torch() -> None:
    labels = torch.from_numpy(np.random.default_rng(1).integers(0, 131_072, size=(3, 700)))
    table = torch.rand(TABLE_SIZE, generator=torch.Generator().manual_seed(TABLE_SEED))
    expected = torch.zeros(labels.shape, dtype=torch.bool)
    expected[:, 49:] = table[labels.unfold(-1, 50, 1).prod(-1) % TABLE_SIZE] < 1 / 50
    assert np.array_equal(goldfish_mask(labels, 50, 50), expected.numpy())


def test_the_same_text_is_masked_alike_wherever_it_stands() -> None:
    rng = np.random.default_rng(2)
    passage, h = rng.integers(1, 1000, 200) | 1, 10
    one, other = (goldfish_mask(np.concatenate([rng.integers(1, 1000, n), passage]), 5, h)[n:] for n in (17, 90))
    assert np.array_equal(one[h - 1 :], other[h - 1 :])


def test_the_first_labels_of_each_row_stay() -> None:
    labels = np.random.default_rng(3).integers(1, 1000, size=(64, 60)) | 1
    mask = goldfish_mask(labels, 2, 50)
    assert not mask[:, :49].any()
    assert mask[:, 49:].any()


def test_a_row_shorter_than_the_window_is_not_masked() -> None:
    assert not goldfish_mask(np.arange(1, 50), 2, 50).any()


@pytest.mark.parametrize("h", range(1, 20))
def test_products_by_doubling_are_the_products(h: int) -> None:
    values = np.arange(1, 41, dtype=np.int64)
    assert window_products(values, h).tolist() == [int(np.prod(values[i : i + h], dtype=np.int64)) for i in range(len(values) - h + 1)]


def test_about_one_label_in_fifty_is_dropped() -> None:
    labels = np.random.default_rng(4).integers(0, 65_536, size=400_000) | 1
    assert goldfish_mask(labels, 50, 50).mean() == pytest.approx(0.0199009, abs=0.001)


@pytest.mark.parametrize(("k", "h", "shape"), [(0, 50, (4,)), (50, 0, (4,)), (50, 50, (1, 2, 3))])
def test_what_makes_no_sense_is_refused(k: int, h: int, shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="goldfish"):
        goldfish_mask(np.ones(shape, dtype=np.int64), k, h)
