"""Parts of the memory of a GPU that are counted by hand."""

from __future__ import annotations

from typing import Any

import pytest
from torch.distributed.pipelining.schedules import ScheduleInterleaved1F1B, _ComputationType

from flows.planning.estimate.memory import Memory, memory_of_rank
from flows.planning.estimate.sizes import parameters
from specs.launch import Parallel
from specs.layout import backward_passes, micro_batches_in_flight
from specs.model import ModelSpec
from specs.optimizer import OptimizerSpec
from specs.schedule import Schedule
from specs.settings import Precision
from specs.stages.domain_weights import DomainWeightsSegment, WeightUpdate
from specs.stages.qrpo import QrpoLoss, QrpoSegment
from specs.stages.training import Segment

MODEL = ModelSpec(dim=256, n_layers=6, n_heads=8, n_kv_heads=2, head_dim=32, ffn_dim=1344, vocab_size=4096)
TOKENS, ROW = 512, 512 * 256 * 2  # of a micro-batch, and the bytes of its states in bfloat16


def memory(processes: int, parallel: Parallel, rank: int = 0, kind: Any = Segment, **changes: Any) -> Memory:
    fields: dict[str, Any] = {
        "model": MODEL,
        "sequence_length": TOKENS,
        "global_batch_size": 8,
        "micro_batch_size": 1,
        "optimizer": OptimizerSpec(name="adamw", lr=1e-3).resolved({}),
        "schedule": Schedule(),
        "precision": Precision(param="bfloat16"),
        "end_step": 1,
        "parallel": parallel,
    }
    return memory_of_rank(kind(**{**fields, **changes}), processes, rank)


@pytest.mark.parametrize(
    ("parallel", "rank", "buffers"),
    [
        (Parallel(pp=2), 0, 1),  # gradients
        (Parallel(pp=2), 1, 1),  # states
        (Parallel(pp=3), 1, 2),  # both
        (Parallel(pp=2, pp_schedule="interleaved-1f1b"), 0, 3),  # stages 0 and 2
        (Parallel(pp=2, pp_schedule="interleaved-1f1b"), 1, 3),  # stages 1 and 3
        (Parallel(pp=2, pp_schedule="interleaved-1f1b", virtual_stages=3), 0, 5),  # stages 0, 2 and 4
        (Parallel(), 0, 0),
    ],
)
def test_a_pipeline_has_buffers_for_what_it_receives_of_every_micro_batch(
    parallel: Parallel, rank: int, buffers: int
) -> None:
    less, more = (memory(parallel.pp, parallel, rank, global_batch_size=batch) for batch in (12, 24))
    assert more.communication - less.communication == 12 * buffers * ROW


@pytest.mark.parametrize(
    ("parallel", "rank", "waiting"),
    [
        (Parallel(), 0, [1]),
        (Parallel(pp=4), 1, [3]),
        (Parallel(pp=4, pp_schedule="gpipe"), 1, [16]),
        (
            Parallel(pp=2, pp_schedule="interleaved-1f1b"),
            0,
            [3, 2],
        ),  # two of each stage, then one of the first
        (Parallel(pp=2, pp_schedule="interleaved-1f1b"), 1, [2, 1]),
        (Parallel(pp=8, pp_schedule="interleaved-1f1b"), 0, [15, 8]),
        (Parallel(pp=8, pp_schedule="interleaved-1f1b"), 7, [8, 1]),
        (Parallel(pp=2, pp_schedule="interleaved-1f1b", virtual_stages=3), 0, [3, 2, 2]),
    ],
)
def test_micro_batches_wait_in_the_stages_that_have_passed_them(
    parallel: Parallel, rank: int, waiting: list[int]
) -> None:
    assert micro_batches_in_flight(parallel, rank, 16) == waiting


@pytest.mark.parametrize("rank", range(4))
@pytest.mark.parametrize("chunks", [2, 3])
def test_backward_passes_of_one_round_are_those_of_torch(chunks: int, rank: int) -> None:
    schedule = object.__new__(ScheduleInterleaved1F1B)
    schedule.n_local_stages, schedule._n_microbatches, schedule.pp_group_size = chunks, 4, 4
    schedule.microbatches_per_round = 4
    waiting, passed, expected = [0] * chunks, [0] * chunks, []
    for action in filter(None, schedule._calculate_single_rank_operations(rank)):
        chunk = action.stage_index // 4
        if action.computation_type == _ComputationType.FORWARD:
            waiting[chunk] += 1
        else:
            expected.append((chunk, passed[chunk] == 0, list(waiting)))
            waiting[chunk] -= 1
            passed[chunk] += 1
    parallel = Parallel(pp=4, pp_schedule="interleaved-1f1b", virtual_stages=chunks)
    assert list(backward_passes(parallel, rank)) == expected


@pytest.mark.parametrize(
    ("parallel", "batch", "gradients"),
    [
        (Parallel(pp=2), 2, False),  # both wait for the first backward pass
        (Parallel(pp=2), 3, True),  # the third begins after it
        (Parallel(pp=2, pp_schedule="gpipe"), 3, False),
        (Parallel(pp=2, pp_schedule="interleaved-1f1b"), 2, False),
        (Parallel(pp=2, pp_schedule="interleaved-1f1b"), 4, True),
        (Parallel(), 1, False),
        (Parallel(), 2, True),
    ],
)
def test_gradients_exist_after_the_backward_pass_of_a_micro_batch(
    parallel: Parallel, batch: int, gradients: bool
) -> None:
    deep = MODEL.model_copy(update={"n_layers": 22})
    found = memory(parallel.pp, parallel, model=deep, global_batch_size=batch, sequence_length=16_384)
    assert found.moment == "backward"
    own = 11 * parameters(MODEL).layer  # of a process, at least
    assert (found.gradients > 4 * own) == gradients


def test_sequence_parallelism_divides_what_a_pipeline_receives() -> None:
    layout = Parallel(pp=2, tp=2, sequence_parallel=True)
    less, more = (memory(4, layout, global_batch_size=batch) for batch in (8, 16))
    assert more.communication - less.communication == 8 * ROW / 2


@pytest.mark.parametrize(
    ("parallel", "stages"),
    [(Parallel(), 1), (Parallel(pp=2), 1), (Parallel(pp=2, pp_schedule="interleaved-1f1b"), 2)],
)
def test_the_layers_of_a_stage_share_a_table_of_positions(parallel: Parallel, stages: int) -> None:
    short, long = (memory(parallel.pp, parallel, sequence_length=length) for length in (512, 1024))
    assert long.weights - short.weights == stages * 512 * 2 * 32 * 4


def test_losses_of_log_probabilities_keep_no_gradient_of_the_output_weight_until_it_is_made() -> None:
    length, table = 8192, 4 * 4096 * 256
    fields = {"sequence_length": length, "model": MODEL.model_copy(update={"ffn_dim": 5376})}
    plain = memory(1, Parallel(), **fields)
    preferred = memory(1, Parallel(), **fields, kind=QrpoSegment, loss=QrpoLoss())
    assert plain.moment == preferred.moment == "backward"
    assert plain.output - table == preferred.output == length * 256 * 2


@pytest.mark.parametrize("activation", ["xielu", "swiglu"])
def test_the_parameters_of_a_rank_without_tensor_parallelism_are_those_of_the_model(activation: str) -> None:
    model = MODEL.model_copy(update={"activation": activation})
    found = parameters(model)
    assert model.n_layers * found.layer + found.embedding + found.head == model.parameters


@pytest.mark.parametrize(("rows", "sums"), [(4, 0), (2, 1)])
def test_sources_that_are_learned_from_hold_a_gradient_each(rows: int, sums: int) -> None:
    """Of two sources with four rows each, the second is under way: beside the gradient of the first there is
    a sum where it has several micro-batches."""
    model = MODEL.model_copy(update={"vocab_size": 131_072})
    fields = {
        "model": model,
        "precision": Precision(param="float32"),
        "sources": 2,
        "update": WeightUpdate(),
        "micro_batch_size": rows,
    }
    found = memory(1, Parallel(), kind=DomainWeightsSegment, **fields)
    assert found.moment == "loss"
    assert found.gradients == (1 + sums) * 4 * model.parameters
