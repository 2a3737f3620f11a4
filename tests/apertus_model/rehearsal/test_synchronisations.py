"""The host waits for the GPU once in a step: of the miniature here, of every part of the shipped recipes in
tests/flows/execution/test_rehearsal.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from apertus_model.rehearsal import fake_cuda
from apertus_model.rehearsal.observer import _blocks
from flows.execution.rehearsal import rehearse
from tools.published import plan_of

aten = torch.ops.aten


@pytest.mark.skipif(not fake_cuda.possible(), reason=f"no {fake_cuda.COMPILER}, which compiles the fake CUDA")
def test_the_host_waits_for_the_gpu_once_in_a_step() -> None:
    part = plan_of("mini").estimates.parts[0]
    found = rehearse(part, "H100", 8, 0).ranks[0].report
    assert found.rehearsed is not None, found.failure
    waits = [(line.place.split(":")[0], line.what, line.calls) for line in found.rehearsed.synchronisations]
    assert waits == [("apertus_model/trainer/lifecycle.py", "tolist", 1)]


@pytest.mark.parametrize(
    ("func", "args", "kwargs", "waits"),
    [
        (aten._to_copy.default, (torch.ones(1),), {"device": "cuda"}, True),
        (aten._to_copy.default, (torch.ones(1),), {"device": "cuda", "non_blocking": True}, False),
        (aten.add.Tensor, (torch.ones(1), torch.ones(1)), {}, False),
    ],
)
def test_a_copy_to_the_gpu_blocks_unless_it_is_told_not_to(
    func: Any, args: Any, kwargs: dict[str, Any], waits: bool
) -> None:
    assert _blocks(func, args, kwargs) is waits
