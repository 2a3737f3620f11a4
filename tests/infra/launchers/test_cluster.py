"""How processes are divided among nodes."""

from __future__ import annotations

import pytest

from infra.launchers.cluster import nodes_of
from specs.errors import StageError
from specs.launch import Launch
from specs.profiles import Profile


@pytest.mark.parametrize(
    ("processes", "most", "expected"), [(1, 4, (1, 1)), (4, 4, (1, 4)), (8, 4, (2, 4)), (6, 4, (2, 3))]
)
def test_processes_are_divided_evenly_among_as_few_nodes_as_they_need(
    processes: int, most: int, expected: tuple[int, int]
) -> None:
    assert nodes_of(Launch(processes=processes), Profile(gpus_per_node=most)) == expected


def test_processes_that_cannot_be_divided_are_refused() -> None:
    with pytest.raises(
        StageError,
        match=r"launch.processes is 5, which 2 nodes of 4 GPUs cannot share evenly. Fix: use a multiple of 4",
    ):
        nodes_of(Launch(processes=5), Profile(gpus_per_node=4))
