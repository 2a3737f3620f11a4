"""The peak of a step is that of the tensors that live together in it."""

from __future__ import annotations

import torch

from apertus_model.rehearsal.allocations import Allocations


def tensor(kilobytes: int) -> torch.Tensor:
    return torch.empty(kilobytes * 1024, dtype=torch.uint8)


def peak(allocations: Allocations) -> dict[str, int]:
    return {live.origin.operator: live.bytes // 1024 for live in allocations.peak()}


def test_the_peak_has_what_lives_together_and_not_what_has_ended() -> None:
    allocations = Allocations(block=1024)
    first = tensor(1)
    allocations.see(first, "first")
    allocations.begin()
    second = tensor(8)
    allocations.see(second, "second")
    allocations.see(second[10:], "its view")
    del second
    third = tensor(4)
    allocations.see(third, "third")
    assert peak(allocations) == {"first": 1, "second": 8}


def test_what_ended_before_the_step_has_no_peak() -> None:
    allocations = Allocations(block=1024)
    large = tensor(64)
    allocations.see(large, "large")
    del large
    allocations.begin()
    small = tensor(2)
    allocations.see(small, "small")
    assert peak(allocations) == {"small": 2}


def test_what_lives_unseen_has_no_peak_and_what_it_leaves_has() -> None:
    allocations = Allocations(block=1024)
    allocations.begin()
    before = tensor(2)
    allocations.see(before, "before")
    with allocations.unseen():
        passing, left = tensor(64), tensor(4)
        allocations.see(passing, "passing")
        allocations.see(left, "left")
        del passing
    after = tensor(1)
    allocations.see(after, "after")
    assert peak(allocations) == {"before": 2, "left": 4, "after": 1}


def test_a_storage_that_is_emptied_counts_nothing_and_again_when_it_is_filled() -> None:
    allocations = Allocations(block=512)
    allocations.begin()
    gathered = tensor(4)
    allocations.see(gathered, "gathered")
    storage = gathered.untyped_storage()
    storage.resize_(0)
    allocations.resized(storage)
    other = tensor(1)
    allocations.see(other, "other")
    storage.resize_(6 * 1024 + 1)
    allocations.resized(storage)
    assert peak(allocations) == {"gathered": 6, "other": 1}
    assert sum(live.bytes for live in allocations.peak()) == 1024 + 6 * 1024 + 512


def test_the_step_in_pieces_has_the_fullest_moment_of_each() -> None:
    allocations = Allocations(block=1024)
    weight = tensor(4)
    allocations.see(weight, "weight")
    allocations.name([weight], "weights")
    allocations.seconds = 99.0
    allocations.begin()
    assert allocations.seconds == 0.0
    for second, kilobytes in ((1.0, 1), (1.5, 8), (9.0, 2), (10.0, 3)):
        allocations.seconds = second
        passing = tensor(kilobytes)
        allocations.see(passing, "passing")
        del passing
    found = [
        (time, {kind: size // 1024 for kind, size in kinds.items() if size})
        for time, kinds in allocations.moments(pieces=2)
    ]
    assert found == [(1.5, {"weights": 4, "other": 8}), (10.0, {"weights": 4, "other": 3})]


def test_a_kind_is_the_use_that_is_stated_first_else_that_of_the_code_that_made_it() -> None:
    allocations = Allocations()
    weight, left = tensor(1), tensor(1)
    for each in (weight, left):
        allocations.see(each, "made")
    allocations.name([weight], "weights")
    allocations.name([weight], "gradients")
    allocations.begin()
    assert [live.kind for live in allocations.peak()] == ["weights", "other"]
