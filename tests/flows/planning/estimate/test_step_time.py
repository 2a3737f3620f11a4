"""The time of a step by formulas. Its sums beside those of a rehearsal: `tests/apertus_model/rehearsal`."""

from __future__ import annotations

from typing import Any

import pytest

from apertus_model.rehearsal.rates import Rates
from flows.planning.estimate import flops
from flows.planning.estimate.step_time import StepTime, bubble, of_rank, of_step
from specs.launch import Parallel
from specs.mamba import Mamba
from specs.model import ModelSpec
from tests.flows.planning.segments import segment

RATES = Rates("H100", 8)


def step(processes: int, rates: Rates = RATES, many: int = 1, **parallel: object) -> StepTime:
    """Of one sequence per micro-batch and `many` of these on each data-parallel rank."""
    changes = {name: parallel.pop(name) for name in list(parallel) if name not in Parallel.model_fields}
    layout = Parallel.model_validate(parallel)
    batch = many * processes // (layout.tp * layout.cp * layout.pp)
    one = segment(parallel=layout, global_batch_size=batch, micro_batch_size=1, **changes)
    return of_step(one, processes, rates)


def test_a_step_takes_its_operations_at_their_rate_and_what_it_moves() -> None:
    once = flops.forward(ModelSpec(flavour="8b"), 4096)
    products = 4096 * 3 * (once.projections + once.output) / RATES.speed("matrix", 2)
    scores = 4096 * once.scores / 2 * 7 / 2 / RATES.speed("attention", 2)
    found = step(1, many=8)
    assert found.waited == found.bubble == 0
    assert 1 < found.compute / 8 / (products + scores) < 2
    assert found.total == found.compute


def test_recomputation_takes_what_it_repeats() -> None:
    none, selective, full = (
        step(1, activation_checkpointing=again).total for again in ("none", "selective", "full")
    )
    once = 4096 * flops.forward(ModelSpec(flavour="8b"), 4096).projections / RATES.speed("matrix", 2)
    assert none < selective < full > none + once


def test_ranks_that_share_layers_wait_for_the_slowest_link_between_them() -> None:
    inside, across = step(8, tp=8), step(8, Rates("H100", 4), tp=8)
    assert inside.compute == across.compute
    # NVLink reaches 380 GB/s; four cards of 50 GB/s lead out of a node of four
    assert 380 / 200 < across.waited / inside.waited < 3.5


def test_sequence_parallelism_divides_norms_and_sends_as_much() -> None:
    plain, split = step(8, tp=8), step(8, tp=8, sequence_parallel=True)
    assert split.waited == pytest.approx(plain.waited, rel=0.1)
    assert split.compute != plain.compute


def test_ranks_of_a_sequence_have_the_scores_of_its_last_part() -> None:
    """Without load balance: half of all scores on one rank, 3/4 of its share on the last of two."""
    one, two = step(1, sequence_length=65_536), step(2, cp=2, sequence_length=65_536)
    once = flops.forward(ModelSpec(flavour="8b"), 65_536).scores * 65_536 * 7 / 2
    scores = once / RATES.speed("attention", 2)
    assert one.compute - scores / 2 == pytest.approx(2 * (two.compute - scores / 2 * 3 / 4), rel=0.05)
    assert two.waited > 0


def test_fsdp_is_waited_for_only_where_it_takes_longer_than_computation() -> None:
    assert step(8, many=4, sequence_length=32_768).waited == 0
    assert step(1024, sequence_length=1024).waited > 0
    assert step(1024, sequence_length=1024, dp_replicate=128).waited > 0


@pytest.mark.parametrize(
    ("schedule", "idle"), [("1f1b", 3 / 8), ("gpipe", 3 / 8), ("interleaved-1f1b", 3 / 16)]
)
def test_a_pipeline_idles_at_both_ends(schedule: str, idle: float) -> None:
    assert bubble(Parallel.model_validate({"pp": 4, "pp_schedule": schedule}), 8) == idle
    found = step(4, many=8, pp=4, pp_schedule=schedule)
    assert found.bubble == idle
    assert found.total == pytest.approx((found.compute + found.waited) * (1 + idle))
    assert step(4, many=8).bubble == 0


def test_a_step_takes_what_its_busiest_rank_takes() -> None:
    """8B in four stages: the last has the output, and one layer less."""
    one = segment(parallel=Parallel(pp=4), global_batch_size=8, micro_batch_size=1)
    ranks = [of_rank(one, 4, rank, RATES).total for rank in range(4)]
    assert of_step(one, 4, RATES).total == max(ranks)
    assert len(set(ranks)) == 4 - 1 or len(set(ranks)) == 4


def test_a_memory_budget_recomputes_what_is_not_kept() -> None:
    def seconds(**changes: Any) -> float:
        return step(1, activation_checkpointing="memory_budget", compile=True, **changes).compute

    none, full = (step(1, activation_checkpointing=kind, compile=True).compute for kind in ("none", "full"))
    assert seconds(memory_budget=1.0) == pytest.approx(none)
    assert seconds(memory_budget=0.0) == pytest.approx(full)
    assert seconds(memory_budget=0.5) == pytest.approx((none + full) / 2)


def test_mamba_2_takes_gates_and_its_products_in_the_place_of_scores() -> None:
    """In half of the layers. A token of a longer sequence takes little more."""
    eight = ModelSpec(flavour="8b")
    hybrid = eight.model_copy(update={"mamba": Mamba(layers=list(range(16)))})

    def scores(length: int) -> float:
        return length * flops.forward(eight, length).scores / 2 * 7 / 2 / RATES.speed("attention", 2)

    found = []
    for length in (4096, 32_768):
        plain, half = (step(1, model=one, sequence_length=length).compute for one in (eight, hybrid))
        found.append((half - (plain - scores(length) / 2)) / length)
    gates = 16 * 3 * 2 * hybrid.mamba_matrices / RATES.speed("matrix", 2)
    assert found[0] == pytest.approx(found[1], rel=0.1) and gates < found[0]
    assert step(1, model=hybrid, activation_checkpointing="full").total > step(1, model=hybrid).total
