"""What single exchanges count. Those of whole steps, beside ranks of gloo: test_counts.py."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch.distributed._functional_collectives import all_gather_tensor, reduce_scatter_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from apertus_model.rehearsal.observer import StepObserver
from apertus_model.rehearsal.rates import Rates, hidden_seconds

RATES, RANKS, SIDE = Rates("H100", 8), 4, 64
SIZE = 4 * SIDE * SIDE  # bytes of a matrix


@pytest.fixture
def observer() -> Iterator[StepObserver]:
    """The first of four ranks, whose peers do nothing, with real tensors."""
    dist.init_process_group("fake", rank=0, world_size=RANKS, store=FakeStore())
    made = StepObserver(RATES, "cpu")
    with made:
        made.begin()
        yield made
    torch._C._set_only_lift_cpu_tensors(False)  # which an observer sets
    dist.destroy_process_group()


def test_bytes_are_those_of_the_whole_tensor_and_only_functional_ones_do_not_wait(
    observer: StepObserver,
) -> None:
    matrix = torch.ones(SIDE, SIDE)
    dist.all_reduce(matrix)
    dist.all_reduce(matrix)
    dist.send(matrix, 3)
    all_gather_tensor(matrix, 0, dist.group.WORLD).sum()
    found = {kind: exchange for (kind, _), exchange in observer.exchanges.sent.items()}
    counted = {kind: (one.calls, one.bytes, one.asynchronous) for kind, one in found.items()}
    assert counted == {
        "all-reduce": (2, 2 * SIZE, 0),
        "send": (1, SIZE, 0),
        "all-gather": (1, RANKS * SIZE, 1),
    }
    assert found["all-gather"].seconds == RATES.collective("all-gather", RANKS * SIZE, [0, 1, 2, 3])
    assert found["send"].seconds == RATES.collective("send", SIZE, [0, 3])
    assert not any(one.hidden_seconds for one in found.values())


def test_products_hide_the_gather_of_their_input_until_nothing_is_left(observer: StepObserver) -> None:
    """The input of both products is a copy of what was gathered; the second hides what the first left."""
    assert dist.group.WORLD is not None
    observer.exchanges.overlapped = dist.group.WORLD.group_name
    weights = torch.ones(SIDE, 8)
    whole = all_gather_tensor(torch.ones(SIDE, SIDE), 0, dist.group.WORLD).clone()
    for _ in range(2):
        whole @ weights
    product = observer.costs.seconds["matrix", "mm"] / 2
    (gather,) = observer.exchanges.sent.values()
    first = hidden_seconds(gather.seconds, product, RANKS)
    assert first > 0
    assert gather.hidden_seconds == first + hidden_seconds(gather.seconds - first, product, RANKS)


def test_a_product_hides_the_reduction_of_its_result_and_no_other(observer: StepObserver) -> None:
    assert dist.group.WORLD is not None
    observer.exchanges.overlapped = dist.group.WORLD.group_name
    matrix = torch.ones(SIDE, SIDE)
    reduce_scatter_tensor(matrix + 1, "sum", 0, dist.group.WORLD).sum()
    (reduction,) = observer.exchanges.sent.values()
    assert reduction.hidden_seconds == 0
    reduce_scatter_tensor(matrix @ matrix, "sum", 0, dist.group.WORLD).sum()
    product = observer.costs.seconds["matrix", "mm"]
    assert reduction.hidden_seconds == hidden_seconds(reduction.seconds / 2, product, RANKS)
