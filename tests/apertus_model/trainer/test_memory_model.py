"""The memory that a plan expects is what torch allocates in a step of the real trainer, within a tenth."""

from __future__ import annotations

import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from apertus_model.model.model import model_config
from apertus_model.trainer.optimizer import optimizer_config
from flows.planning.estimate.layer_memory import Device
from flows.planning.estimate.memory import memory_of_step
from flows.planning.estimate.sizes import adapters
from flows.planning.estimate.storage import checkpoint_bytes
from specs.capabilities import OPTIMIZERS
from specs.launch import Parallel
from specs.layer_schedule import DepthAverage, LayerPairs, Repeats
from specs.mamba import Mamba
from specs.model import ModelSpec
from specs.optimizer import OptimizerSpec
from specs.settings import Lora, Precision
from specs.sparse_attention import Dropped, Hashed
from specs.stages.distill import DistillLoss
from tests.apertus_model.harness import ListedSamples, PreferenceRows, Result, segment, train
from tests.apertus_model.step_costs import local, peak_of_step
from tests.machine import slow

DEVICE: Device = "cuda" if torch.cuda.is_available() else "cpu"
WIDE = ModelSpec(dim=256, n_layers=4, n_heads=8, n_kv_heads=2, head_dim=32, ffn_dim=1344, vocab_size=4096)
WIDER = WIDE.model_copy(update={"dim": 512, "n_layers": 6, "n_heads": 16, "n_kv_heads": 4})
GATED = WIDE.model_copy(update={"activation": "swiglu", "qk_norm": False})
DEEP = ModelSpec(dim=128, n_layers=8, n_heads=4, n_kv_heads=4, head_dim=32, ffn_dim=512, vocab_size=16_384)
FLAT = ModelSpec(dim=512, n_layers=3, n_heads=8, n_kv_heads=4, head_dim=64, ffn_dim=2688, vocab_size=1024)
SUMMED = DEEP.model_copy(update={"vocab_size": 1024, "depth_average": DepthAverage()})
SPARSE = SUMMED.model_copy(update={"n_layers": 10, "depth_average": DepthAverage(dilation=2, period=3)})
HASHED = WIDE.model_copy(update={"attention": Hashed(sparse="hash", buckets=4)})
DROPPED = WIDE.model_copy(update={"attention": Dropped(sparse="drop")})
ADAMW = OptimizerSpec(name="adamw", lr=1e-3).resolved({})
ADEMAMIX = OptimizerSpec(lr=1e-3).resolved({})
BFLOAT16 = Precision(param="bfloat16")
ROUNDED = OptimizerSpec(lr=1e-3, state_dtype="bfloat16").resolved({})


class WholeSamples(ListedSamples):
    """Every label is trained on."""

    def __init__(self, length: int) -> None:
        super().__init__()
        self.length, self.masked = length, False


class OfSources(WholeSamples):
    """In steps of four sequences, each of another source."""

    def __getitem__(self, index: int) -> Any:
        return SimpleNamespace(**super().__getitem__(index)._asdict(), source=index % 4)


SAMPLES: dict[str, Any] = {
    "domain_weights": OfSources,
    "pretrain": WholeSamples,
    "sft": WholeSamples,
    "distill": WholeSamples,
    "qrpo": PreferenceRows,
}


def peak(
    folder: Path, model: ModelSpec, processes: int = 1, parallel: Parallel | None = None, **changes: Any
) -> tuple[int, float]:
    """What the GPU (process) that needs the most has, and what is expected: bytes. `micro`: sequences of a
    micro-batch; `batches`: number of micro-batches of a step."""
    parallel = parallel or Parallel()
    length, micro, batches = changes.pop("length"), changes.pop("micro", 1), changes.pop("batches", 1)
    kind = changes.pop("kind", "pretrain")
    ranks = processes // (parallel.tp * parallel.cp * parallel.pp)
    spec = segment(
        kind, model=model, sequence_length=length, global_batch_size=micro * batches * ranks,
        micro_batch_size=micro, end_step=1,
        parallel=parallel, **changes,
    )  # fmt: skip

    def check(trainer: Any) -> None:
        (folder / f"peak-{next(numbers)}-{torch.distributed.get_rank()}").write_text(
            str(peak_of_step(trainer))
        )

    numbers = itertools.count()
    results: list[Result] = train(
        folder, spec, processes=processes, inspect=check, data=lambda: SAMPLES[kind](length)
    )
    assert len(results) == processes
    return (
        max(int(path.read_text()) for path in folder.glob("peak-*")),
        memory_of_step(spec, processes, DEVICE).total,
    )


@pytest.mark.parametrize(
    ("model", "changes"),
    [
        slow(WIDE, {"length": 256, "micro": 4, "optimizer": ADAMW, "precision": Precision(param="bfloat16")}),
        slow(FLAT, {"length": 512, "micro": 2, "optimizer": ROUNDED, "activation_checkpointing": "full",
        "precision": BFLOAT16}),
        (DEEP, {"length": 256, "micro": 2, "batches": 2, "optimizer": ADEMAMIX,
        "activation_checkpointing": "selective"}),
        slow(GATED, {"length": 256, "micro": 4, "optimizer": ADAMW, "precision": BFLOAT16,
        "activation_checkpointing": "selective"}),
        slow(WIDE, {"length": 512, "micro": 4, "kind": "distill", "teacher": WIDER, "optimizer": ADAMW,
        "precision": BFLOAT16}),
        slow(WIDE, {"length": 512, "micro": 2, "kind": "distill", "teacher": WIDER, "optimizer": ADAMW,
        "loss": DistillLoss(direction="reverse")}),
        slow(WIDE, {"length": 256, "batches": 4, "kind": "domain_weights", "sources": 4, "optimizer": ADAMW}),
        slow(FLAT, {"length": 128, "batches": 4, "kind": "domain_weights", "sources": 4, "optimizer": ADAMW,
        "precision": BFLOAT16}),
    ],
)  # fmt: skip
def test_a_step_on_one_process_takes_what_is_expected(
    tmp_path: Path, model: ModelSpec, changes: dict[str, Any]
) -> None:
    found, expected = peak(tmp_path, model, **changes)
    assert expected == pytest.approx(found, rel=0.1)


@pytest.mark.parametrize(
    ("model", "changes"),
    [
        (SUMMED, {"activation_checkpointing": "full"}),
        slow(SUMMED, {"precision": BFLOAT16}),
        slow(SPARSE, {"precision": BFLOAT16, "activation_checkpointing": "full"}),
        slow(SPARSE, {"activation_checkpointing": "selective"}),
    ],
)
def test_the_states_of_sums_take_what_is_expected(
    tmp_path: Path, model: ModelSpec, changes: dict[str, Any]
) -> None:
    """Without them, the first would be 8% too low."""
    found, expected = peak(tmp_path, model, length=256, micro=4, optimizer=ADAMW, **changes)
    assert expected == pytest.approx(found, rel=0.02)


@pytest.mark.parametrize(
    ("model", "changes"),
    [
        (HASHED, {"activation_checkpointing": "full"}),
        slow(HASHED, {"precision": BFLOAT16}),
        slow(DROPPED, {"activation_checkpointing": "selective"}),
    ],
)
def test_the_masks_of_heads_take_what_is_expected(
    tmp_path: Path, model: ModelSpec, changes: dict[str, Any]
) -> None:
    found, expected = peak(tmp_path, model, length=512, micro=2, optimizer=ADAMW, **changes)
    assert expected == pytest.approx(found, rel=0.03)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("processes", "parallel", "changes"),
    [
        (2, Parallel(), {"micro": 4}),
        (2, Parallel(), {"micro": 4, "activation_checkpointing": "full"}),
        (2, Parallel(), {"micro": 2, "batches": 2, "precision": Precision(param="float32")}),
        (2, Parallel(dp_replicate=2), {"micro": 2}),
        (2, Parallel(reshard_after_forward="never"), {"micro": 2, "batches": 2}),
        (4, Parallel(pp=2, reshard_after_forward="always"), {"batches": 4}),
        (2, Parallel(tp=2), {"micro": 4}),
        (2, Parallel(tp=2, sequence_parallel=True), {"micro": 4}),
        (2, Parallel(cp=2), {"micro": 4}),
        (2, Parallel(), {"micro": 4, "kind": "distill", "teacher": WIDER}),
        (2, Parallel(pp=2), {"batches": 4, "kind": "distill", "teacher": WIDER}),
        (2, Parallel(pp=2), {"batches": 4}),
        (2, Parallel(pp=2), {"batches": 2}),
        (2, Parallel(pp=2), {"batches": 4, "activation_checkpointing": "full"}),
        (2, Parallel(pp=2, pp_schedule="gpipe"), {"batches": 4}),
        (4, Parallel(pp=2), {"batches": 4}),
        (4, Parallel(tp=2), {"batches": 4, "activation_checkpointing": "selective"}),
    ],
)
def test_a_step_on_several_processes_takes_what_is_expected(
    tmp_path: Path, processes: int, parallel: Parallel, changes: dict[str, Any]
) -> None:
    found, expected = peak(
        tmp_path, WIDE, processes, parallel, length=512, optimizer=ADAMW, **{"precision": BFLOAT16, **changes}
    )
    assert expected == pytest.approx(found, rel=0.1)


@pytest.mark.slow
@pytest.mark.parametrize("batches", [4, 8])
@pytest.mark.parametrize("checkpointing", ["none", "full"])
def test_two_stages_to_a_process_take_what_is_expected(
    tmp_path: Path, batches: int, checkpointing: str
) -> None:
    """`interleaved-1f1b` on two processes: four stages, of eight layers."""
    found, expected = peak(
        tmp_path, DEEP, 2, Parallel(pp=2, pp_schedule="interleaved-1f1b"), length=512, batches=batches,
        optimizer=ADAMW, precision=BFLOAT16,
        activation_checkpointing=checkpointing,
    )  # fmt: skip
    assert expected == pytest.approx(found, rel=0.1)


@pytest.mark.slow
@pytest.mark.parametrize("checkpointing", ["none", "selective", "full"])
@pytest.mark.parametrize("optimizer", [ADAMW, ADEMAMIX, ROUNDED], ids=["adamw", "ademamix", "rounded"])
@pytest.mark.parametrize("param", ["float32", "bfloat16"])
def test_every_combination_of_checkpointing_optimizer_and_precision(
    tmp_path: Path, checkpointing: str, optimizer: OptimizerSpec, param: Any
) -> None:
    for model, length, micro in ((WIDE, 256, 4), (FLAT, 512, 1)):
        found, expected = peak(
            tmp_path / str(length), model, length=length, micro=micro, optimizer=optimizer,
            precision=Precision(param=param),
            activation_checkpointing=checkpointing,
        )  # fmt: skip
        assert expected == pytest.approx(found, rel=0.1)


@pytest.mark.slow
def test_layers_of_one_step_keep_what_they_keep_one_after_the_other(tmp_path: Path) -> None:
    pairs = {"vocab_size": 1024, "layer_pairs": LayerPairs(start=1, layers=6)}
    measured, expected = peak(tmp_path, DEEP.model_copy(update=pairs), length=256)
    assert measured == pytest.approx(expected, rel=0.1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("repeats", "changes"),
    [
        ({"keys": "all"}, {}),
        ({"keys": "own"}, {}),
        ({"keys": "all"}, {"activation_checkpointing": "full"}),
        ({"keys": "all"}, {"activation_checkpointing": "selective"}),
        ({"keys": "all"}, {"precision": BFLOAT16}),
    ],
)
def test_layers_keep_for_each_of_their_runs_what_they_read(
    tmp_path: Path, repeats: dict[str, Any], changes: dict[str, Any]
) -> None:
    model = DEEP.model_copy(
        update={"vocab_size": 1024, "repeats": Repeats(start=2, layers=4, times=3, **repeats)}
    )
    measured, expected = peak(tmp_path, model, length=256, micro=4, optimizer=ADAMW, **changes)
    assert expected == pytest.approx(measured, rel=0.1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layers", "changes"),
    [
        ("all", {}),
        ([0, 2, 3, 5, 6], {}),
        ("all", {"activation_checkpointing": "full"}),
        ("all", {"activation_checkpointing": "selective"}),
        ("all", {"precision": BFLOAT16}),
    ],
)
def test_layers_of_mamba_2_keep_the_matrices_of_their_chunks(
    tmp_path: Path, layers: Any, changes: dict[str, Any]
) -> None:
    model = DEEP.model_copy(update={"vocab_size": 1024, "mamba": Mamba(layers=layers)})
    measured, expected = peak(tmp_path, model, length=256, micro=4, optimizer=ADAMW, **changes)
    assert expected == pytest.approx(measured, rel=0.1)


@pytest.mark.slow
@pytest.mark.parametrize("compare", ["matrix", "hidden"])
def test_mixers_that_are_compared_keep_their_matrices_or_what_they_give(tmp_path: Path, compare: Any) -> None:
    teacher = DEEP.model_copy(update={"vocab_size": 1024})
    student = teacher.model_copy(update={"mamba": Mamba(layers="all")})
    measured, expected = peak(
        tmp_path, student, length=256, micro=4, optimizer=ADAMW, kind="distill", teacher=teacher,
        loss=DistillLoss(compare=compare), trainable=["layers.*.attention.*"],
    )  # fmt: skip
    assert expected == pytest.approx(measured, rel=0.1)


@pytest.mark.slow
def test_parameters_that_rest_have_no_gradients_and_no_states(tmp_path: Path) -> None:
    """Two of the upper layers are trained: nothing is kept of those below, which no gradient reaches."""
    measured, expected = peak(
        tmp_path, DEEP.model_copy(update={"vocab_size": 1024}), length=256, trainable=["layers.[56].*"]
    )
    assert measured == pytest.approx(expected, rel=0.1)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "changes"), [("sft", {"lora": Lora(rank=8)}), ("sft", {}), ("qrpo", {})])
def test_other_kinds_of_training_take_what_is_expected(
    tmp_path: Path, kind: str, changes: dict[str, Any]
) -> None:
    found, expected = peak(
        tmp_path, WIDE, kind=kind, length=256, micro=4, optimizer=ADAMW, precision=BFLOAT16, **changes
    )
    assert expected == pytest.approx(found, rel=0.1)


SMALL = ModelSpec(dim=16, n_layers=2, n_heads=2, n_kv_heads=1, head_dim=8, ffn_dim=40, vocab_size=128)


WITH_MAMBA = SMALL.model_copy(update={"n_layers": 3, "mamba": Mamba(layers=[1])})


@pytest.mark.parametrize(
    ("name", "small"),
    [
        *((name, SMALL) for name in (*OPTIMIZERS, "ademamix in bfloat16")),
        ("soap", WITH_MAMBA),
        ("soap", SMALL.model_copy(update={"activation": "swiglu"})),
        ("muon", WITH_MAMBA),
    ],
)
def test_states_of_an_optimizer_have_the_size_that_is_expected(name: str, small: ModelSpec) -> None:
    spec = OptimizerSpec(
        name=name.split()[0], lr=1e-3, state_dtype="bfloat16" if " " in name else None  # type: ignore[arg-type]
    ).resolved({})  # fmt: skip
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    model = model_config(small, sequence_length=16, attention="sdpa").build()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter)
    state = optimizer_config(spec).build(model_parts=[model]).state_dict()
    torch.set_num_threads(threads)
    weights = sum(parameter.nbytes for parameter in model.parameters())
    found = weights + sum(
        local(tensor).nbytes
        for tensor in state.values()
        if tensor.numel() > 1 or tensor.dtype != torch.float64
    )
    assert checkpoint_bytes(segment(model=small, optimizer=spec)) == pytest.approx(found, rel=0.01)


def test_adapters_have_the_number_of_parameters_that_is_expected() -> None:
    lora = Lora(rank=8, targets=["wq", "wv", "down_proj"])
    model = model_config(SMALL, sequence_length=16, attention="sdpa", lora=lora).build()
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    assert trained == SMALL.n_layers * adapters(SMALL, lora.rank, list(lora.targets))
