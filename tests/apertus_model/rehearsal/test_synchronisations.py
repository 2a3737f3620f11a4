"""The host waits for the GPU once in a step, in every layout of the shipped recipes.

How often it waits does not depend on the number of layers, so these have as few as their pipeline takes; and
there are two micro-batches, or as many as fill the pipeline."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from apertus_model.rehearsal import fake_cuda
from apertus_model.rehearsal.observer import _blocks
from apertus_model.rehearsal.records import Task
from flows.execution.rehearsal import rehearse, run_ranks
from flows.planning.estimate.memory import micro_batches_of
from specs.stages.training import Segment
from tools.published import plan_of

aten = torch.ops.aten


def layouts(name: str) -> dict[str, tuple[str, Segment, int]]:
    """The segments of a recipe that minimise cross-entropy and differ in what a rank does: kind, segment and
    processes, by what differs."""
    found: dict[str, tuple[str, Segment, int]] = {}
    for part in plan_of(name).estimates.parts:
        spec = part.segment
        if spec.objective in ("cross-entropy", "weighted-cross-entropy"):
            differs = f"{spec.parallel} {spec.objective} {spec.activation_checkpointing} {spec.attention}"
            found.setdefault(differs, (part.node.kind, spec, part.gpus))
    return found


@pytest.mark.skipif(not fake_cuda.possible(), reason=f"no {fake_cuda.COMPILER}, which compiles the fake CUDA")
@pytest.mark.parametrize(
    "recipe",
    [
        "mini",
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in ("apertus-8b", "apertus-70b", "optimizer-consistency", "goldfish")
        ),
    ],
)
def test_the_host_waits_for_the_gpu_once_in_a_step(recipe: str) -> None:
    for layout, (kind, spec, processes) in layouts(recipe).items():
        parallel = spec.parallel
        few = spec.model.model_copy(update={"n_layers": max(2, 2 * parallel.stages - 2)})
        _, micro_batches = micro_batches_of(spec, processes)
        batch = spec.global_batch_size // micro_batches * min(micro_batches, max(2, parallel.pp))
        small = spec.model_copy(update={"model": few, "global_batch_size": batch})
        segment = small.model_dump(mode="json")
        ranks = sorted({0, processes // parallel.pp * (parallel.pp - 1)})  # the last stage has the loss
        tasks = [
            Task(kind=kind, segment=segment, world_size=processes, rank=rank, gpu="H100", gpus_per_node=4)
            for rank in ranks
        ]
        for report in run_ranks(tasks):
            assert report.rehearsed is not None, (layout, report.failure)
            waits = [
                (line.place.split(":")[0], line.what, line.calls)
                for line in report.rehearsed.synchronisations
            ]
            assert waits == [("apertus_model/trainer/lifecycle.py", "tolist", 1)], layout


@pytest.mark.slow
@pytest.mark.skipif(not fake_cuda.possible(), reason=f"no {fake_cuda.COMPILER}, which compiles the fake CUDA")
@pytest.mark.parametrize(
    ("recipe", "name"),
    [
        ("domain-weights-mini", "proxy-target-28"),
        ("mamba-mini", "align-orient-28"),
        ("distill-mini", "student-forward-28"),
        ("mini", "align-qrpo"),
    ],
)
def test_so_it_does_with_other_objectives(recipe: str, name: str) -> None:
    part = next(one for one in plan_of(recipe).estimates.parts if one.node.name == name)
    found = rehearse(part, "H100", 8, 0).ranks[0].report
    assert found.rehearsed is not None, found.failure
    waits = [(line.place.split(":")[0], line.calls) for line in found.rehearsed.synchronisations]
    assert waits == [("apertus_model/trainer/lifecycle.py", 1)]


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
