"""Memory of a teacher, whose sum in a step is compared with torch's in
`tests/apertus_model/trainer/test_memory_model.py`."""

from __future__ import annotations

from typing import Any

import pytest

from apertus_model.rehearsal.rates import Rates
from flows.planning.estimate import flops
from flows.planning.estimate.memory import memory_of_rank
from flows.planning.estimate.rank import Rank, TeacherMemory
from flows.planning.estimate.step_time import of_step
from specs.capabilities import OBJECTIVES
from specs.launch import Parallel
from specs.model import ModelSpec
from specs.settings import Precision
from specs.stages.distill import DistillLoss, DistillSegment
from tests.flows.planning.segments import segment

TEACHER = ModelSpec(flavour="70b")


def student(**changes: Any) -> DistillSegment:
    fields = segment("8b").model_dump() | {"teacher": TEACHER, "loss": DistillLoss(), **changes}
    return DistillSegment.model_validate(fields)


def test_its_weights_are_sharded_in_the_precision_of_the_pass() -> None:
    found = Rank(student(), 64, 0, "cuda").teacher
    table = 4 * 4096 * 2 * TEACHER.head_dim
    assert found.shard - table == pytest.approx(2 * TEACHER.parameters / 64)
    assert found.head == 2 * (TEACHER.vocab_size + 1) * TEACHER.dim
    assert Rank(student(precision=Precision(param="float32")), 1, 0, "cuda").teacher.head == 0
    stored = student(top_k=8)
    assert Rank(stored, 64, 0, "cuda").teacher == TeacherMemory()
    assert stored.teacher_beside is None
    # four tensors of scores; of stored words also one of booleans
    objectives = [OBJECTIVES[one.objective] for one in (segment("8b"), student(), stored)]
    assert [objective.chunk_logits for objective in objectives] == [0, 4, 4.25]


def test_the_last_process_of_a_pipeline_has_it() -> None:
    parallel = Parallel(pp=4)
    with_teacher, without = (
        [memory_of_rank(one, 256, rank).weights for rank in range(4)]
        for one in (student(parallel=parallel), student(parallel=parallel, top_k=8))
    )
    assert with_teacher[:3] == without[:3]
    assert with_teacher[3] - without[3] > 2 * TEACHER.parameters / 64


def test_a_step_takes_its_forward_pass_longer() -> None:
    rates, tokens = Rates("H100", 8), 4096
    beside, stored = (
        of_step(student(top_k=k, global_batch_size=64, micro_batch_size=1), 64, rates) for k in (None, 8)
    )
    once = flops.forward(TEACHER, tokens)
    products = tokens * (once.projections + once.output) / rates.speed("matrix", 2)
    assert products < beside.compute - stored.compute < 2 * products
    assert flops.training(student()) - flops.training(student(top_k=8)) == once.total
