"""Operators without values: what the host still reads of them, and where it waits. What they count:
test_costs.py and test_exchanges.py; whole steps: test_counts.py."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor

from apertus_model.rehearsal.observer import StepObserver
from apertus_model.rehearsal.rates import Rates


@pytest.fixture
def observer() -> Iterator[StepObserver]:
    made = StepObserver(Rates("H100", 8), "cuda")
    with made:
        made.begin()
        yield made
    torch._C._set_only_lift_cpu_tensors(False)  # which an observer sets


def on_gpu(observer: StepObserver, values: torch.Tensor, known: bool = True) -> torch.Tensor:
    """A FakeTensor like `values`, and with them where they are known."""
    meta = torch.empty_like(values, device="meta")
    made = FakeTensor(observer._fake, meta, torch.device("cuda:0"))
    if known:
        made.value = values  # type: ignore[attr-defined]  # as the observer keeps them
    return made


def waits(observer: StepObserver) -> dict[str, int]:
    return {what: calls for (_, what), calls in observer.waits.items()}


def test_whole_numbers_that_follow_from_the_batch_are_true(observer: StepObserver) -> None:
    labels = on_gpu(observer, torch.tensor([5, -100, 7, 9, -100]))
    kept = labels != -100
    assert kept.sum().item() == 3
    assert observer.read(kept.cumsum(0)) == [1, 1, 2, 3, 3]
    assert waits(observer) == {"item": 1, "tolist": 1}


def test_a_number_that_follows_from_weights_is_one(observer: StepObserver) -> None:
    weights = on_gpu(observer, torch.zeros(2, 3), known=False)
    assert (weights * 0).sum().item() == 1.0
    assert waits(observer) == {"item": 1}


def test_numbers_of_the_cpu_are_computed_and_wait_for_nothing(observer: StepObserver) -> None:
    assert (torch.arange(4) * 2).sum().item() == 12
    assert not observer.waits


def test_what_runs_unseen_is_no_part_of_the_step(observer: StepObserver) -> None:
    weights = on_gpu(observer, torch.zeros(4, 4), known=False)
    with observer.unseen():
        (weights @ weights).sum().item()
    assert not observer.waits and not observer.costs.calls
    weights @ weights
    assert observer.costs.flops["matrix", "mm"] == 2 * 4**3
