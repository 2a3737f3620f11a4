"""torchtitan's calls of a newer torch."""

from apertus_model.model.older_torch import OLDER_TORCH, without


def test_arguments_that_an_older_torch_does_not_take_are_left_out() -> None:
    assert without(lambda *args, **options: (args, options), "new")(1, old=2, new=3) == ((1,), {"old": 2})


def test_the_pinned_torch_is_new_enough() -> None:
    assert not OLDER_TORCH
