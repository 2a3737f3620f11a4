"""Continuations are compared with what was repeated."""

from apertus_model.evaluation.memorisation import compare


def test_continuations_are_compared_by_equality_subsequence_and_run() -> None:
    assert compare([1, 2, 3, 4], [1, 2, 3, 4]) == (1.0, 1.0, 1.0)
    assert compare([1, 2, 3, 4], [1, 2, 9, 4]) == (0.0, 0.75, 0.5)
    assert compare([1, 2, 3, 4], [5, 6, 7, 8]) == (0.0, 0.0, 0.0)
    assert compare([1, 2, 3, 4], [4, 1, 2, 3]) == (0.0, 0.75, 0.75)
