"""The loader: exact order, whatever is read ahead; nothing left behind."""

from __future__ import annotations

import threading
import time
import traceback
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import numpy as np
import pytest

from apertus_model.trainer.loader import SampleLoader, computed_ahead


class Numbered(NamedTuple):
    input: np.ndarray
    labels: np.ndarray
    positions: np.ndarray


class Samples:
    """Sample i is [i, i], waited for in several threads, computed after a wait that puts the threads out
    of order. `broken` raises."""

    remote = True

    def __init__(self, broken: int = -1) -> None:
        self.broken = broken

    def __getitem__(self, index: int) -> Numbered:
        time.sleep(0.001 * (index * 7 % 5))
        if index == self.broken:
            raise KeyError(f"sample {index}")
        array = np.full(2, index, np.int64)
        return Numbered(array, array, np.arange(2))


def _loader(
    prefetch: int, samples: Samples | None = None, *, ranks: int = 1, rank: int = 0, micro: int = 2
) -> SampleLoader:
    chosen = samples or Samples()
    config = SampleLoader.Config(
        samples=chosen, first_sample=lambda step: 100 + step * 8, global_batch_size=8, prefetch=prefetch
    )
    return SampleLoader(config, dp_world_size=ranks, dp_rank=rank, local_batch_size=micro)


def _take(loader: SampleLoader, batches: int) -> list[int]:
    iterator = iter(loader)
    return [index for _ in range(batches) for index in next(iterator)[1][:, 0].tolist()]


def _threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("prefetch")]


def _join() -> bool:
    """Whether every thread ends."""
    for thread in _threads():
        thread.join(timeout=20)
    return not _threads()


@pytest.mark.parametrize("prefetch", [0, 1, 3, 8])
def test_batches_come_in_order_whatever_is_read_ahead(prefetch: int) -> None:
    loader = _loader(prefetch)
    assert _take(loader, 10) == list(range(100, 120))
    loader.close()


@pytest.mark.parametrize(("ranks", "micro"), [(1, 8), (2, 1), (4, 2)])
def test_the_ranks_share_each_global_batch(ranks: int, micro: int) -> None:
    per_rank = 2 * 8 // ranks // micro
    loaders = [_loader(4, ranks=ranks, rank=rank, micro=micro) for rank in range(ranks)]
    taken = [_take(loader, per_rank) for loader in loaders]
    for loader in loaders:
        loader.close()
    turns = [
        taken[rank][turn * micro : (turn + 1) * micro] for turn in range(per_rank) for rank in range(ranks)
    ]
    assert [index for turn in turns for index in turn] == list(range(100, 116))


def test_seeking_forgets_what_was_read_ahead() -> None:
    loader = _loader(8)
    before = iter(loader)
    next(before)
    loader.seek(5)
    assert list(before) == []
    assert _take(loader, 4) == list(range(140, 148))
    loader.seek(0)
    assert _take(loader, 1) == [100, 101]
    loader.close()


def test_no_thread_outlives_the_loader() -> None:
    loader = _loader(8)
    _take(loader, 3)
    assert _threads()
    loader.close()
    assert _join()
    loader.close()


def test_an_error_comes_where_its_batch_was_due_and_says_where_it_happened() -> None:
    batches = iter(_loader(8, Samples(broken=105)))
    assert [next(batches)[1][0, 0].item() for _ in range(2)] == [100, 102]
    with pytest.raises(KeyError, match="sample 105") as error:
        next(batches)
    assert "__getitem__" in [frame.name for frame in traceback.extract_tb(error.value.__traceback__)]
    assert _join()


def test_reads_wait_side_by_side() -> None:
    both = threading.Barrier(2, timeout=20)
    results = computed_ahead([partial(both.wait) for _ in range(2)], ahead=2, threads=2)
    assert sorted(results) == [0, 1]


def test_closing_waits_for_no_thread() -> None:
    """The garbage collector may close the generator in a thread that holds what the end of another one
    needs."""
    begun, go_on = threading.Event(), threading.Event()
    results = computed_ahead([partial(int, 0), partial(begun.set), partial(go_on.wait, 20)], ahead=2)
    assert next(results) == 0
    assert begun.wait(20)
    results.close()
    assert _threads(), "the last call still waits"
    go_on.set()
    assert _join()


def test_no_more_is_held_than_asked_for() -> None:
    begun: list[int] = []

    def call(number: int) -> int:
        begun.append(number)
        return number

    calls: list[Callable[[], int]] = [partial(call, number) for number in range(20)]
    results = computed_ahead(calls, ahead=3, threads=3)
    for taken in range(1, 10):
        assert next(results) == taken - 1
        assert set(begun) <= set(range(taken + 3))
    results.close()
    assert len(begun) <= 12


def test_calls_that_end_give_all_their_results() -> None:
    assert list(computed_ahead([partial(int, number) for number in range(5)], ahead=3)) == [0, 1, 2, 3, 4]
    assert list(computed_ahead([partial(int, number) for number in range(5)], ahead=0)) == [0, 1, 2, 3, 4]
