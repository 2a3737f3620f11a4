from __future__ import annotations

from fractions import Fraction

import numpy as np

from apertus_model.data.order.permutation import times_seen


def seen(items: int, repeats: str, epoch: int, source: int = 0) -> np.ndarray:
    return times_seen(items, Fraction(repeats), seed=1, source=source, epoch=epoch)


def test_parts_of_successive_epochs_go_round() -> None:
    epochs = [seen(10, "2.3", epoch) for epoch in range(10)]
    assert [counts.sum() for counts in epochs] == [23] * 10
    assert {count for counts in epochs for count in counts.tolist()} == {2, 3}
    assert sum(epochs).tolist() == [23] * 10
    assert not (epochs[0] == seen(10, "2.3", 0, source=1)).all()


def test_numbers_are_rounded_halves_up_and_nothing_is_a_source_too() -> None:
    assert seen(5, "0.5", 0).sum() == 3 and seen(4, "0.1", 0).sum() == 0
    assert seen(3, "2", 7).tolist() == [2, 2, 2]
    assert seen(0, "0.5", 0).tolist() == []
