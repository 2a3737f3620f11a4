"""Batches with equally many samples of each source, in the order of the sources' windows."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from apertus_model.data.order.mixture import MixtureOrder
from apertus_model.data.order.samples import EqualSamples, MixtureSamples


def opened(weights: list[int]) -> MixtureSamples:
    """Three sources of 5, 7 and 4 windows."""
    windows: list[Any] = [SimpleNamespace(sample=lambda window, source: (source, window)) for _ in range(3)]
    return MixtureSamples(windows, MixtureOrder(weights, [5, 7, 4], 28, keys=["x", "y", "z"]))


def test_every_batch_has_equally_many_of_each_source_and_a_pass_has_every_window() -> None:
    samples = EqualSamples(opened([1, 1, 1]), 6)
    drawn: Any = [samples[index] for index in range(60)]
    for batch in range(10):
        assert [source for source, _ in drawn[6 * batch : 6 * batch + 6]] == [0, 0, 1, 1, 2, 2]
    for source, windows in enumerate((5, 7, 4)):
        own = [window for one, window in drawn if one == source]
        assert sorted(own[:windows]) == list(range(windows)) == sorted(own[windows : 2 * windows])


def test_windows_come_in_the_order_of_any_mixture() -> None:
    mixed, equal = opened([1, 5, 2]), EqualSamples(opened([1, 1, 1]), 6)
    before: Any = [mixed[index] for index in range(200)]
    after: Any = [equal[index] for index in range(60)]
    for source in range(3):
        one, other = ([sample for sample in found if sample[0] == source] for found in (before, after))
        shorter = min(len(one), len(other))
        assert one[:shorter] == other[:shorter] and shorter >= 20


def test_passes_are_counted() -> None:
    samples = EqualSamples(opened([1, 1, 1]), 6)
    assert samples.epochs(60) == [20 / 5, 20 / 7, 20 / 4]
    assert samples.epochs(9) == [4 / 5, 3 / 7, 2 / 4]
