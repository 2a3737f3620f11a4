"""What single operators compute and move. Whole steps: test_counts.py."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from apertus_model.model.xielu import xielu
from apertus_model.rehearsal.costs import FUSED, Costs, _lengths
from apertus_model.rehearsal.observer import StepObserver
from apertus_model.rehearsal.rates import Rates
from apertus_model.trainer.optimizer import optimizer_config
from specs.capabilities import OPTIMIZERS, OptimizerName
from specs.optimizer import OptimizerSpec

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


def test_operators_that_return_nothing_count_too(matrix: torch.Tensor) -> None:
    """Those of optimizers: what they change is read and written. A copy does not read what it overwrites."""
    observer = StepObserver(RATES, "cpu")
    with observer:
        weights, states = [matrix.clone(), matrix.clone()], [matrix.clone(), matrix.clone()]
        rounded = torch.empty(SIDE, SIDE, dtype=torch.bfloat16)
        observer.begin()
        torch._foreach_add_(weights, states)
        torch._foreach_addcdiv_(weights, states, weights)
        torch._foreach_copy_([rounded], [states[0]])
        rounded.copy_(matrix)
        states[0].zero_()
        torch.zeros_like(matrix)
        torch.mul(matrix, 2.0, out=rounded)
        torch.addmm(matrix, matrix, matrix, out=matrix)
    assert dict(observer.costs.moved) == {
        ("memory", "_foreach_add_"): 2 * 3 * SIZE, ("memory", "_foreach_addcdiv_"): 2 * 4 * SIZE,
        ("memory", "_foreach_copy_"): SIZE + SIZE // 2, ("memory", "copy_"): SIZE + SIZE // 2,
        ("memory", "zero_"): SIZE,
        ("memory", "zeros_like"): SIZE, ("memory", "mul"): SIZE + SIZE // 2, ("matrix", "addmm"): 4 * SIZE,
    }  # fmt: skip


def test_a_fused_adamw_reads_four_tensors_and_writes_three(matrix: torch.Tensor) -> None:
    parameter = torch.nn.Parameter(matrix)
    optimizer, observer = torch.optim.AdamW([parameter], fused=True), StepObserver(RATES, "cpu")
    with observer:
        for _ in range(2):
            parameter.grad = torch.ones(SIDE, SIDE)
            observer.begin()
            optimizer.step()
    assert observer.costs.moved["memory", "_fused_adamw_"] == pytest.approx(7 * SIZE, abs=8)
    assert set(observer.costs.classes) == {"optimizer"}


@pytest.mark.parametrize("name", [name for name, facts in OPTIMIZERS.items() if not facts.kernel])
def test_an_update_without_a_kernel_moves_what_its_facts_say(
    name: OptimizerName, matrix: torch.Tensor
) -> None:
    """SOAP also averages two squares of a matrix, which here have its size."""
    model, observer = torch.nn.Linear(SIDE, SIDE, bias=False), StepObserver(RATES, "cpu")
    spec = OptimizerSpec(name=name, lr=1e-3, weight_decay=0.1).resolved({})
    with observer:
        optimizers = optimizer_config(spec).build(model_parts=[model])
        for _ in range(3):
            model.weight.grad = torch.ones(SIDE, SIDE)
            observer.begin()
            optimizers.step()
    squares = 2 * 3 if name == "soap" else 0
    moved = sum(memory_bound(observer.costs).values())
    assert moved == pytest.approx((OPTIMIZERS[name].accesses + squares) * SIZE, rel=0.01)


def test_operators_have_the_classes_of_what_calls_them(matrix: torch.Tensor) -> None:
    """Also where autograd runs the formulas of a backward pass: they have the class of the forward pass."""
    norm, table = torch.nn.RMSNorm(SIDE), torch.nn.Embedding(SIDE, SIDE)
    classes = dict[str, dict[str, float]]()
    with StepObserver(RATES, "cpu") as observer:
        tokens = torch.arange(SIDE)
        for name, work in {
            "embedding and loss": lambda: table(tokens),
            "norms": lambda: norm(matrix.requires_grad_()),
            "activation": lambda: torch.nn.functional.softplus(matrix.requires_grad_()),
            "products": lambda: matrix.requires_grad_() @ matrix.detach(),
            "other": lambda: matrix.requires_grad_() + 1,
            "casts and copies": lambda: matrix.requires_grad_().to(torch.bfloat16),
        }.items():
            observer.begin()
            result = work()
            result.backward(torch.ones_like(result))
            classes[name] = dict(observer.costs.classes)
    for name, seconds in classes.items():
        assert seconds.pop(name) > 0
        assert set(seconds) <= {"casts and copies", "other"} - {name}, (name, seconds)
