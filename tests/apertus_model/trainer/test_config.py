"""Settings reach torchtitan's configuration; what cannot run is refused before anything is built."""

from typing import Any

import pytest

from apertus_model.trainer.config import micro_batch_size, recomputed, stage_modules, trainer_config
from apertus_model.trainer.lifecycle import Lifecycle
from apertus_model.trainer.trainer import ApertusTrainer
from flows.planning.estimate.sizes import layers_of_rank
from specs.launch import Parallel
from tests.apertus_model.harness import MODEL, Data, SyntheticSamples, segment

INTERLEAVED = {"pp": 2, "pp_schedule": "interleaved-1f1b"}


def config_of(world_size: int = 1, kind: str = "pretrain", **changes: Any) -> ApertusTrainer.Config:
    """torchtitan's configuration of a tiny segment."""
    unused: Any = None
    lifecycle = Lifecycle(
        begin_step=0, source=None, storage=unused, stop_requested=lambda: False, scratch="unused"
    )
    return trainer_config(
        segment(kind, **changes), Data(SyntheticSamples()), unused, lifecycle, world_size=world_size
    )


# Settings that are torchtitan's own


@pytest.mark.parametrize("deterministic", [True, False])
def test_kernels_are_deterministic_unless_the_stage_says_otherwise(deterministic: bool) -> None:
    changes = {} if deterministic else {"deterministic": False}
    assert config_of(**changes).debug.deterministic is deterministic


@pytest.mark.parametrize("policy", ["default", "always", "never"])
def test_gathered_weights_are_kept_as_the_layout_says(policy: Any) -> None:
    config = config_of(parallel=Parallel(reshard_after_forward=policy), world_size=2)
    assert config.parallelism.fsdp_reshard_after_forward == policy


def test_the_stages_of_a_pipeline_are_those_that_the_plan_counts() -> None:
    config = config_of(
        world_size=2,
        model=MODEL.model_copy(update={"n_layers": 11}),
        global_batch_size=8,
        parallel=Parallel(**INTERLEAVED, virtual_stages=3),
    )
    parts = config.parallelism.module_fqns_per_model_part
    assert parts is not None
    assert [len(names) for names in parts] == [3, 2, 2, 2, 2, 3]  # the last has the norm and the output
    assert parts[0] == ["tok_embeddings", "layers.0", "layers.1"]
    assert parts[-1] == ["layers.10", "norm", "lm_head"]
    for rank in range(2):
        counted = [sum(name.startswith("layers.") for name in names) for names in parts[rank::2]]
        assert counted == layers_of_rank(11, 6, 2, rank)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("none", None),
        ("selective", recomputed.SelectiveAC.Config()),
        ("full", recomputed.FullAC.Config()),
        ("memory_budget", recomputed.MemoryBudgetAC.Config(memory_budget=0.25)),
    ],
)
def test_layers_are_recomputed_as_the_stage_says(kind: str, expected: Any) -> None:
    config = config_of(activation_checkpointing=kind, memory_budget=0.25, compile=True)
    assert config.activation_checkpoint == expected


def test_overlapping_tensor_parallelism_is_left_to_the_compiler_of_a_gpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    layout = Parallel(tp=2, sequence_parallel=True, async_tp=True)
    for there in (False, True):
        monkeypatch.setattr("apertus_model.trainer.config.has_gpu", lambda there=there: there)
        if there:
            config = config_of(world_size=2, parallel=layout, compile=True).compile
            assert config.enable_async_tensor_parallel
        else:
            with pytest.raises(ValueError, match="async_tp needs the symmetric memory of GPUs"):
                config_of(world_size=2, parallel=layout, compile=True)


@pytest.mark.parametrize(("name", "expected"), [("none", None), ("head-tail", "headtail")])
def test_sequences_are_split_as_the_layout_says(name: Any, expected: str | None) -> None:
    config = config_of(world_size=2, parallel=Parallel(cp=2, cp_load_balancer=name))
    assert config.parallelism.context_parallel_load_balancer == expected


@pytest.mark.parametrize("stages", [2, 3, 4, 6])
@pytest.mark.parametrize("layers", [10, 11, 12, 13])
def test_layers_are_divided_as_torchtitan_divides_them(layers: int, stages: int) -> None:
    from torchtitan.distributed.pipeline_parallel import _generate_llm_fqn_per_model_part

    assert stage_modules(layers, stages) == _generate_llm_fqn_per_model_part(stages, layers)


# What cannot run is refused before anything is built


def test_a_batch_that_the_processes_cannot_divide_is_refused() -> None:
    with pytest.raises(
        ValueError, match="global batch of 4 sequences cannot be divided among 3 data-parallel processes"
    ):
        micro_batch_size(segment(), world_size=3)
    with pytest.raises(ValueError, match="3 processes cannot be divided into groups of tp 2 x cp 1 x pp 1"):
        micro_batch_size(segment(parallel=Parallel(tp=2)), world_size=3)


@pytest.mark.parametrize(
    ("requested", "world_size", "used"), [(None, 1, 12), (5, 1, 4), (8, 2, 6), (1, 4, 1), (6, 4, 3)]
)
def test_the_micro_batch_is_the_largest_that_divides_the_share_of_a_process(
    requested: int | None, world_size: int, used: int
) -> None:
    assert (
        micro_batch_size(segment(global_batch_size=12, micro_batch_size=requested), world_size=world_size)
        == used
    )


@pytest.mark.parametrize(
    ("kind", "name", "changes"),
    [("qrpo", "qrpo", {}), ("sft", "weighted-cross-entropy", {"prompt_weight": 0.5})],
)
def test_a_pipeline_is_refused_for_objectives_that_need_more_than_labels(
    kind: str, name: str, changes: dict[str, Any]
) -> None:
    unused: Any = None  # refused before anything is used
    with pytest.raises(ValueError, match=rf"the objective '{name}' cannot run in a pipeline \(pp: 2\)"):
        trainer_config(
            segment(kind, parallel=Parallel(pp=2), **changes), unused, unused, unused, world_size=2
        )


@pytest.mark.parametrize(
    ("schedule", "share", "at_most", "size"),
    [
        ("1f1b", 8, None, 4),
        ("1f1b", 8, 3, 2),
        ("gpipe", 3, None, 1),
        ("interleaved-1f1b", 12, None, 3),
        ("interleaved-1f1b", 10, 2, 1),
    ],
)
def test_a_pipeline_has_as_many_micro_batches_as_stages(
    schedule: Any, share: int, at_most: int | None, size: int
) -> None:
    spec = segment(
        global_batch_size=share, micro_batch_size=at_most, parallel=Parallel(pp=2, pp_schedule=schedule)
    )
    assert micro_batch_size(spec, world_size=2) == size


def test_a_share_that_cannot_be_cut_for_a_pipeline_is_refused() -> None:
    # rounds of 2 and 3 micro-batches are not equal
    spec = segment(global_batch_size=7, parallel=Parallel(**INTERLEAVED))
    with pytest.raises(
        ValueError, match="7 sequences per step and process cannot be cut for a pipeline of 4 stages"
    ):
        micro_batch_size(spec, world_size=2)
