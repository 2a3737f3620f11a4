"""What a rehearsal counts is what ranks of gloo do, and what can be counted by hand."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from apertus_model.rehearsal import fake_cuda
from apertus_model.rehearsal.records import RankTask, Rehearsed
from flows.execution.rehearsal import run_ranks
from flows.planning.estimate import flops
from specs.launch import Parallel
from specs.model import ModelSpec
from specs.optimizer import OptimizerSpec
from specs.settings import Precision
from specs.stages.training import Segment
from tests.apertus_model.harness import ListedSamples, segment, train
from tests.apertus_model.step_costs import flop_counter, peak_of_step

WIDE = ModelSpec(dim=256, n_layers=2, n_heads=8, n_kv_heads=2, head_dim=32, ffn_dim=1344, vocab_size=4096)
DEEP = ModelSpec(dim=128, n_layers=8, n_heads=4, n_kv_heads=4, head_dim=32, ffn_dim=512, vocab_size=2048)
ADAMW = OptimizerSpec(name="adamw", lr=1e-3).resolved({})
BFLOAT16 = Precision(param="bfloat16")
NAMES = {
    "all-gather": ("_allgather_base_", "allgather_", "all_gather_into_tensor"),
    "reduce-scatter": ("_reduce_scatter_base_", "reduce_scatter_", "reduce_scatter_tensor"),
    "all-reduce": ("allreduce_", "all_reduce", "all_reduce_"),
    "send": ("send",),
    "receive": ("recv_",),
}

needs_compiler = pytest.mark.skipif(
    not fake_cuda.possible(), reason=f"no {fake_cuda.COMPILER}, which compiles the fake CUDA"
)


def spec_of(processes: int, parallel: Parallel, model: ModelSpec = WIDE, **changes: Any) -> Segment:
    micro, batches = changes.pop("micro", 2), changes.pop("batches", 1)
    ranks = processes // (parallel.tp * parallel.cp * parallel.pp)
    fields = {"optimizer": ADAMW, "precision": BFLOAT16, "sequence_length": 256, **changes}
    made: Segment = segment(
        model=model,
        micro_batch_size=micro,
        global_batch_size=micro * batches * ranks,
        end_step=1,
        parallel=parallel,
        **fields,
    )
    return made


def rehearsed(spec: Segment, processes: int, device: Any, rank: int = 0) -> Rehearsed:
    task = RankTask(
        kind="pretrain", segment=spec.model_dump(mode="json"), world_size=processes, rank=rank, gpu="H100",
        gpus_per_node=8, device=device,
    )  # fmt: skip
    (report,) = run_ranks([task])
    assert report.failure is None, report.failure
    assert report.rehearsed is not None
    return report.rehearsed


class WholeSamples(ListedSamples):
    """Every label is trained on."""

    def __init__(self, length: int) -> None:
        super().__init__()
        self.length, self.masked = length, False


class Sent(TorchDispatchMode):
    """Counts collectives by operator."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, (DTensor, AsyncCollectiveTensor)) for kind in types):
            return NotImplemented
        self.calls[func.__name__.split(".")[0]] += func.namespace in ("c10d", "_c10d_functional")
        return func(*args, **(kwargs or {}))


class Truth(NamedTuple):
    memory: int
    flops: int
    collectives: dict[str, int]


def really(folder: Path, spec: Segment, processes: int) -> list[Truth]:
    """A step of real ranks on the CPU, which gloo connects."""

    def check(trainer: Any) -> None:
        memory = peak_of_step(trainer)
        with flop_counter() as counter, Sent() as sent:
            trainer.train_step(trainer.batch_generator(trainer.dataloader))
        calls = {kind: sum(sent.calls[name] for name in names) for kind, names in NAMES.items()}
        found = Truth(memory, counter.get_total_flops(), calls)
        (folder / f"truth-{torch.distributed.get_rank()}").write_text(json.dumps(found))

    train(folder, spec, processes=processes, inspect=check, data=lambda: WholeSamples(spec.sequence_length))
    return [Truth(*json.loads((folder / f"truth-{rank}").read_text())) for rank in range(processes)]


def calls(found: Rehearsed) -> dict[str, int]:
    counted = dict.fromkeys(NAMES, 0)
    for line in found.collectives:
        if line.kind in counted:
            counted[line.kind] += line.calls
    return counted


LAYOUTS = [
    pytest.param(2, Parallel(), {"batches": 2, "activation_checkpointing": "full"}, id="fsdp 2"),
    pytest.param(4, Parallel(tp=2), {}, id="fsdp 2 x tp 2", marks=pytest.mark.slow),
    pytest.param(2, Parallel(dp_replicate=2), {}, id="replicated", marks=pytest.mark.slow),
    pytest.param(2, Parallel(tp=2, sequence_parallel=True), {"activation_checkpointing": "selective"},
                 id="tp 2, sequence parallel", marks=pytest.mark.slow),
    pytest.param(2, Parallel(pp=2), {"batches": 4, "model": DEEP}, id="pp 2",
                 marks=pytest.mark.slow),
    pytest.param(2, Parallel(pp=2, pp_schedule="interleaved-1f1b"), {"batches": 4, "model": DEEP},
                 id="pp 2, interleaved", marks=pytest.mark.slow),
]  # fmt: skip


@pytest.mark.parametrize(("processes", "parallel", "changes"), LAYOUTS)
def test_real_tensors_among_fake_peers_count_as_ranks_of_gloo_do(
    tmp_path: Path, processes: int, parallel: Parallel, changes: dict[str, Any]
) -> None:
    spec = spec_of(processes, parallel, **changes)
    truths = really(tmp_path, spec, processes)
    for rank in {0, processes - 1} if parallel.pp > 1 else {0}:  # the ranks of other layouts do the same
        found, truth = rehearsed(spec, processes, "cpu", rank), truths[rank]
        assert found.memory.total == pytest.approx(truth.memory, rel=0.01)
        assert calls(found) == truth.collectives
        # the CPU's kernel of attention is one operator
        once, again = flops.forward(spec.model, spec.sequence_length), spec.activation_checkpointing == "full"
        tokens = spec.tokens_per_step * parallel.pp // processes
        scores = once.scores * len(found.layers) // spec.model.n_layers * (4 if again else 3)
        assert found.flops["matrix"] == truth.flops - tokens * scores


SPLIT = spec_of(4, Parallel(tp=2))


@pytest.fixture(scope="module")
def split() -> Rehearsed:
    """Two layers, tp 2 x fsdp 2, one micro-batch of 512 tokens, on a fake GPU."""
    return rehearsed(SPLIT, 4, "cuda")


@needs_compiler
def test_a_fake_gpu_counts_what_a_hand_counts(split: Rehearsed) -> None:
    """FSDP has four groups: embedding, two layers, norm with output; all are gathered forward, and backward
    all but the last, which stays. Tensor parallelism sums: the embedding; per layer two results forward, two
    gradients of inputs backward, four gradients of what is replicated and used by halves (two slopes of
    xIELU, the norms of queries and keys); the output's largest logits and sums for one chunk, and the
    gradient of its states; the norm of the gradient.
    """
    counted = {(line.kind, line.mesh): line.calls for line in split.collectives}
    assert counted["all-gather", "fsdp"] == 4 + 3
    assert counted["reduce-scatter", "fsdp"] == 4
    assert counted["all-reduce", "tp"] == 1 + 2 * (2 + 2 + 4) + 2 + 1 + 1
    gathered = sum(line.bytes for line in split.collectives if line.kind == "all-gather")
    tables, norms = 4096 * 256 // 2, 2 * 256 + 2 * 32 + 2
    layer = (2 * 256 * 256 + 2 * 256 * 64 + 2 * 256 * 1344) // 2 + norms
    assert gathered == pytest.approx(2 * (2 * tables + 2 * 2 * layer + tables + 256), rel=0.001)
    weights = 4 * (2 * tables + 2 * layer + 256) / 2
    assert split.memory.kinds["weights"] == pytest.approx(weights, rel=0.01)  # blocks of 512 bytes
    assert split.memory.kinds["optimizer_states"] == pytest.approx(2 * weights, rel=0.01)


@needs_compiler
def test_a_fake_gpu_counts_the_operations_of_the_formula(split: Rehearsed) -> None:
    """And those of attention as its kernels compute it: two products forward, five backward."""
    once, tokens = flops.forward(WIDE, SPLIT.sequence_length), SPLIT.tokens_per_step // 4
    assert split.flops["matrix"] == tokens * (flops.training(SPLIT) - 3 * once.scores)
    assert split.flops["attention"] == tokens * once.scores * 7 // 2


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("checkpointing", ["selective", "full"])
def test_flops_of_recomputation_equal_the_formula(checkpointing: str) -> None:
    spec = spec_of(4, Parallel(tp=2), activation_checkpointing=checkpointing)
    once, tokens = flops.forward(WIDE, spec.sequence_length), spec.tokens_per_step // 4
    again = once.scores if checkpointing == "full" else 0
    found = rehearsed(spec, 4, "cuda")
    expected = flops.training(spec) + flops.recomputation(spec) - 3 * once.scores - again
    assert found.flops["matrix"] == tokens * expected
    assert found.flops["attention"] == tokens * (once.scores * 7 // 2 + again)


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize(
    "attention",
    [
        {"sparse": "hash", "buckets": 4},
        {"sparse": "drop", "queries": 0.25, "keys": 0.5},
        {"sparse": "window", "window": 64},
    ],
    ids=lambda fields: fields["sparse"],
)
def test_sparse_attention_takes_the_operations_of_its_pairs(attention: dict[str, Any]) -> None:
    sparse = ModelSpec.model_validate({**WIDE.model_dump(), "attention": attention})
    full, found = (rehearsed(spec_of(2, Parallel(), model), 2, "cuda") for model in (WIDE, sparse))
    spec = spec_of(2, Parallel(), sparse)
    scores, tokens = flops.forward(sparse, spec.sequence_length).scores, spec.tokens_per_step // 2
    assert found.flops["attention"] == pytest.approx(tokens * scores * 7 / 2, rel=1e-3)
    assert found.flops["attention"] < 0.5 * full.flops["attention"]
    assert found.flops["matrix"] == pytest.approx(full.flops["matrix"], rel=1e-3)  # a hash is a product


@needs_compiler
def test_a_kernel_of_the_project_reads_and_writes_each_tensor_once() -> None:
    """Tensors of bfloat16, and the two scalars of xIELU. Rows are long, so that both are reported."""
    spec = spec_of(4, Parallel(tp=2), sequence_length=1024)
    bytes_of = {line.operator: line.bytes for line in rehearsed(spec, 4, "cuda").operators}
    activation = 2 * spec.tokens_per_step // 2 * WIDE.ffn_dim // 2
    assert bytes_of["xielu"] == WIDE.n_layers * (2 * activation + 4)
    assert bytes_of["xielu_backward"] == WIDE.n_layers * (3 * activation + 8)


@needs_compiler
def test_adamw_on_a_gpu_is_one_kernel(split: Rehearsed) -> None:
    """It reads weights, gradients and two moments, and writes all but the gradients: 28 bytes a parameter."""
    bytes_of = {line.operator: line.bytes for line in split.operators}
    assert bytes_of["_fused_adamw_"] == pytest.approx(28 / 4 * split.memory.kinds["weights"], rel=0.01)
    assert not {"_foreach_addcmul_", "_foreach_addcdiv_"} & set(bytes_of)


@needs_compiler
def test_a_compiled_pipeline_fuses_the_norms_of_its_backward_pass() -> None:
    """Which its schedule starts, not the trainer."""
    spec = spec_of(2, Parallel(pp=2, pp_schedule="1f1b"), DEEP, batches=2, compile=True)
    for rank in (0, 1):
        names = {line.operator for line in rehearsed(spec, 2, "cuda", rank).operators}
        assert "fused" in names and "_fused_rms_norm_backward" not in names


@needs_compiler
def test_a_compiler_fuses_nothing_outside_of_layers() -> None:
    """Casts of a process alone, and the loss, take as long as without one. Sophia's extra pass copies weights
    a second time."""
    eager, compiled = (
        rehearsed(spec_of(1, Parallel(), batches=4, compile=compile), 1, "cuda").classes
        for compile in (False, True)
    )
    for kind in ("casts and copies", "embedding and loss", "optimizer", "products", "attention"):
        assert compiled[kind] == pytest.approx(eager[kind], rel=0.02), kind
    sophia = OptimizerSpec(name="sophia", lr=1e-3).resolved({})
    assert rehearsed(spec_of(1, Parallel(), compile=True, optimizer=sophia), 1, "cuda").compute_seconds > 0


@needs_compiler
def test_the_only_wait_for_the_gpu_is_reported_with_file_and_line(split: Rehearsed) -> None:
    (line,) = split.synchronisations
    assert line.place.rsplit(":", 1)[0] == "apertus_model/trainer/lifecycle.py"
    assert (line.what, line.calls) == ("tolist", 1)


@pytest.mark.slow
@needs_compiler
def test_float8_multiplies_the_layers_and_leaves_their_memory() -> None:
    """Products of layers in float8, those of the output in bfloat16; what is kept stays as wide."""
    plain, narrow = (
        rehearsed(spec_of(2, Parallel(), compile=True, precision=one), 2, "cuda")
        for one in (BFLOAT16, Precision(param="bfloat16", linear="float8"))
    )
    scaled = sum(line.flops for line in narrow.operators if line.operator == "_scaled_mm")
    assert scaled == 3 * 2 * 256 * flops.forward(WIDE, 256).projections
    assert narrow.flops == plain.flops
    assert narrow.kinds["matrix"] < plain.kinds["matrix"]
    assert narrow.kinds["memory"] > plain.kinds["memory"]
    assert narrow.memory.total == pytest.approx(plain.memory.total, rel=0.05)


@pytest.mark.slow
@needs_compiler
def test_async_tp_hides_exchanges_beside_the_products_that_read_or_made_what_is_sent() -> None:
    """What is hidden of each collective is at most all but a fourth, on four ranks; nothing else changes."""
    plain, ahead = (
        rehearsed(
            spec_of(4, Parallel(tp=4, sequence_parallel=True, async_tp=apart), DEEP, compile=True), 4, "cuda"
        )
        for apart in (False, True)
    )
    hidden = {line.kind: line.hidden_seconds for line in ahead.collectives if line.mesh == "tp"}
    whole = {line.kind: line.seconds for line in ahead.collectives if line.mesh == "tp"}
    assert not any(line.hidden_seconds for line in plain.collectives)
    for kind in ("all-gather", "reduce-scatter"):
        assert 0 < hidden[kind] < 3 / 4 * whole[kind]
    assert hidden["all-reduce"] == 0
    assert ahead.compute_seconds == pytest.approx(plain.compute_seconds)
    assert plain.waited_seconds - ahead.waited_seconds == pytest.approx(sum(hidden.values()))
