"""What single operators compute and move. Whole steps: test_counts.py."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from apertus_model.model.xielu import xielu
from apertus_model.rehearsal.costs import FUSED, Costs, _lengths
from apertus_model.rehearsal.observer import StepObserver
from apertus_model.rehearsal.rates import Rates

RATES = Rates("H100", 8)
SIDE = 64
SIZE = 4 * SIDE * SIDE  # bytes of a matrix


@pytest.fixture
def matrix() -> Iterator[torch.Tensor]:
    yield torch.ones(SIDE, SIDE)
    torch._C._set_only_lift_cpu_tensors(False)  # which an observer sets


def memory_bound(costs: Costs) -> dict[str, int]:
    return {name: size for (kind, name), size in costs.moved.items() if kind == "memory"}


def step(x: torch.Tensor) -> torch.Tensor:
    """Two operators whose first result is dropped, a product, and another operator."""
    one = x.exp()
    two = one * x
    del one
    three: torch.Tensor = two @ x
    return three.add_(two)


def test_each_operator_reads_its_tensors_and_writes_its_result(matrix: torch.Tensor) -> None:
    observer = StepObserver(RATES, "cpu")
    with observer:
        made = matrix.clone()
        observer.begin()
        step(made)
        observer.costs.end_fusion()
    assert memory_bound(observer.costs) == {"exp": 2 * SIZE, "mul": 3 * SIZE, "add_": 3 * SIZE}


def test_fused_operators_read_what_was_there_and_write_what_is_left(matrix: torch.Tensor) -> None:
    """The first two: one matrix in, one out. The last: two in, one of them changed."""
    observer = StepObserver(RATES, "cpu", fuses=True)
    with observer:
        made = matrix.clone()
        observer.begin()
        result = step(made)
        observer.costs.end_fusion()
    assert result.shape == (SIDE, SIDE)
    assert memory_bound(observer.costs) == {FUSED[1]: (1 + 1) * SIZE + (2 + 1) * SIZE}
    assert observer.costs.calls[FUSED] == 2
    assert observer.costs.flops["matrix", "mm"] == 2 * SIDE**3


def test_a_kernel_of_ours_is_not_fused_with_what_is_around_it(matrix: torch.Tensor) -> None:
    observer, slope = StepObserver(RATES, "cpu", fuses=True), torch.zeros(1)
    with observer:
        made = matrix.clone()
        observer.begin()
        xielu(made.exp(), slope, slope).sin()
        observer.costs.end_fusion()
    assert memory_bound(observer.costs) == {"xielu": 2 * SIZE + 2 * 4, FUSED[1]: 2 * SIZE + SIZE}
    assert observer.costs.calls[FUSED] == 2


def test_what_needs_a_whole_tensor_first_is_a_kernel_that_reads_it_again(matrix: torch.Tensor) -> None:
    """exp and its maximum: one in, one and a number out. The division: number and matrix in, one out."""
    observer = StepObserver(RATES, "cpu", fuses=True)
    with observer:
        made = matrix.clone()
        observer.begin()
        one = made.exp()
        two = one / one.abs().max()
        observer.costs.end_fusion()
    assert two.shape == (SIDE, SIDE)
    assert memory_bound(observer.costs) == {FUSED[1]: (2 * SIZE + 4) + (4 + 2 * SIZE)}


def test_what_needs_a_row_first_is_the_same_kernel(matrix: torch.Tensor) -> None:
    observer = StepObserver(RATES, "cpu", fuses=True)
    with observer:
        made = matrix.clone()
        observer.begin()
        two = made / made.amax(1, keepdim=True)
        observer.costs.end_fusion()
    assert two.shape == (SIDE, SIDE)
    assert observer.costs.calls[FUSED] == 1
    assert memory_bound(observer.costs) == {FUSED[1]: 2 * SIZE}


def test_the_same_of_the_same_values_is_computed_once_by_a_compiler(matrix: torch.Tensor) -> None:
    """What is changed in between is no longer the same."""
    observer = StepObserver(RATES, "cpu", fuses=True)
    with observer:
        made = matrix.clone()
        observer.begin()
        one = made.exp().sin()
        one @ made
        two = made.exp().sin()
        two @ made
        observer.costs.end_fusion()
        once = dict(observer.costs.moved)
        made.add_(1)
        made.exp()
        observer.costs.end_fusion()
    assert once["memory", FUSED[1]] == 2 * SIZE
    assert observer.costs.moved[FUSED] > once[FUSED]


def test_what_fuses_nothing_leaves_no_kernel(matrix: torch.Tensor) -> None:
    observer = StepObserver(RATES, "cpu", fuses=True)
    with observer:
        observer.begin()
        matrix @ matrix
        observer.costs.end_fusion()
        observer.costs.end_fusion()
    assert FUSED not in observer.costs.calls


@pytest.mark.parametrize(
    ("name", "queries", "keys", "lengths"),
    [
        ("flex_attention", 8, 32, (8, 32)),
        ("flex_attention_backward", 8, 8, (8, 8)),
        ("_flash_attention_forward", 8, 32, (1, 1)),
        ("_varlen_attn", 8, 32, (1, 1)),
    ],
)
def test_ranks_that_share_a_sequence_have_fewer_queries_than_keys(
    name: str, queries: int, keys: int, lengths: tuple[int, int]
) -> None:
    query, key = torch.ones(1, 2, queries, 16), torch.ones(1, 2, keys, 16)
    assert _lengths(name, (query, key)) == lengths
