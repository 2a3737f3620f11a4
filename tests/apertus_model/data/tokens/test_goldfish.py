"""The Goldfish mask against the published rule: label by label in Python integers, and window by window as
its authors compute it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from apertus_model.data.tokens.goldfish import (
    TABLE_SEED,
    TABLE_SIZE,
    goldfish_mask,
    hash_table,
    window_products,
)
from tests.numerics import Numerics, largest_difference

TABLE = torch.rand(TABLE_SIZE, generator=torch.Generator().manual_seed(TABLE_SEED))


def test_the_table_is_the_one_that_torch_draws(numerics: Numerics) -> None:
    numerics(
        "losses",
        "Goldfish hash table, numpy alone",
        source="arXiv 2406.10209, ahans30/goldfish-loss",
        against="torch.rand(1,000,003) with seed 2,971,215,073",
        difference=largest_difference(hash_table() / 2**24, TABLE.double()),
        allowed=0.0,
    )


def literal_mask(labels: list[int], k: int, h: int) -> list[bool]:
    """The published rule, label by label, in Python integers."""
    mask = []
    for i in range(len(labels)):
        if i < h - 1:
            mask.append(False)
            continue
        product = 1
        for label in labels[i - h + 1 : i + 1]:
            product = (product * label) % 2**64
        signed = product - 2**64 if product >= 2**63 else product
        mask.append(TABLE[signed % TABLE_SIZE].item() < 1 / k)
    return mask


def authors_mask(labels: torch.Tensor, k: int, h: int) -> torch.Tensor:
    """The same rule with torch's product and remainder of whole windows."""
    mask = torch.zeros(labels.shape, dtype=torch.bool)
    if labels.shape[-1] >= h:
        mask[..., h - 1 :] = TABLE[labels.unfold(-1, h, 1).prod(-1) % TABLE_SIZE] < 1 / k
    return mask


@pytest.mark.parametrize(("k", "h"), [(50, 50), (4, 13), (3, 1), (2, 4), (7, 64)])
def test_the_mask_is_the_published_rule(k: int, h: int) -> None:
    labels = np.random.default_rng(0).integers(1, 131_072, size=(2, 300)) | 1
    mask = goldfish_mask(labels, k, h)
    assert mask.tolist() == [literal_mask(row.tolist(), k, h) for row in labels]
    assert mask.any()


@settings(max_examples=60)
@given(
    shape=st.one_of(st.tuples(st.integers(1, 90)), st.tuples(st.integers(1, 3), st.integers(1, 90))),
    k=st.integers(1, 60),
    h=st.integers(1, 70),
    largest=st.sampled_from([3, 300, 131_072, 2**31]),
    seed=st.integers(0, 1000),
)
def test_arrays_of_any_shape_have_the_mask_of_the_reference(
    numerics: Numerics, shape: tuple[int, ...], k: int, h: int, largest: int, seed: int
) -> None:
    labels = np.random.default_rng(seed).integers(0, largest, size=shape) | (seed % 2)
    expected = authors_mask(torch.from_numpy(labels), k, h)
    assert torch.equal(
        torch.tensor([literal_mask(row.tolist(), k, h) for row in np.atleast_2d(labels)]).view(shape),
        expected,
    )
    found = [goldfish_mask(labels, k, h)]
    if largest < 2**31:
        found += [goldfish_mask(labels.astype(kind), k, h) for kind in (np.int32, np.uint32)]
    numerics(
        "losses",
        "Goldfish mask",
        source="table[product of h labels in int64 mod 1,000,003] < 1 / k, arXiv 2406.10209",
        against="Python integers, and torch's unfold and prod; hypothesis over shapes, k, h and dtypes",
        difference=largest_difference(found, [expected] * len(found)),
        allowed=0.0,
    )


def test_negative_64_bit_product_indexes_from_the_end_of_the_table() -> None:
    labels = np.full(64, 2**21 + 3)
    product = (2**21 + 3) ** 3 - 2**64
    assert -(2**63) <= product < 0
    assert (window_products(labels, 3) == product).all()
    for k in range(1, 40):
        assert goldfish_mask(labels, k, 3)[2:].all() == bool(TABLE[product % TABLE_SIZE] < 1 / k)


def test_the_same_text_is_masked_alike_wherever_it_stands() -> None:
    rng = np.random.default_rng(2)
    passage, h = rng.integers(1, 1000, 200) | 1, 10
    one, other = (
        goldfish_mask(np.concatenate([rng.integers(1, 1000, n), passage]), 5, h)[n:] for n in (17, 90)
    )
    assert np.array_equal(one[h - 1 :], other[h - 1 :])


@settings(max_examples=40)
@given(
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=6),
    h=st.integers(1, 12),
    seed=st.integers(0, 1000),
)
def test_windows_inside_documents_give_each_document_the_mask_that_it_has_alone(
    lengths: list[int], h: int, seed: int
) -> None:
    documents = [np.random.default_rng(seed + i).integers(1, 1000, n) | 1 for i, n in enumerate(lengths)]
    labels, positions = np.concatenate(documents), np.concatenate([np.arange(n) for n in lengths])
    expected = np.concatenate([goldfish_mask(document, 2, h) for document in documents])
    assert np.array_equal(goldfish_mask(labels, 2, h, positions), expected)
    rows = [np.stack([values, values]) for values in (labels, positions)]
    assert np.array_equal(goldfish_mask(rows[0], 2, h, rows[1]), np.stack([expected, expected]))


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
    assert window_products(values, h).tolist() == [
        int(np.prod(values[i : i + h], dtype=np.int64)) for i in range(len(values) - h + 1)
    ]


def test_about_one_label_in_fifty_is_dropped() -> None:
    labels = np.random.default_rng(4).integers(0, 65_536, size=400_000) | 1
    assert goldfish_mask(labels, 50, 50).mean() == pytest.approx(0.0199009, abs=0.001)
