"""The FLOPs that a plan expects are those of the matrix products that the real trainer makes, to the last
one.

torch's counter is told of `addmm_`, which it does not know; attention is computed by the plain backend, which
makes two products forward and four backward. Fused kernels make the scores a second time in their backward
pass, which is no model FLOP.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from flows.planning.estimate import flops
from specs.layer_schedule import DepthAverage, LayerPairs, Repeats
from specs.mamba import Mamba
from specs.model import ModelSpec
from specs.optimizer import OptimizerSpec
from specs.settings import Lora, Precision
from specs.stages.distill import DistillLoss
from tests.apertus_model.harness import ListedSamples, segment, train
from tests.apertus_model.step_costs import flop_counter
from tests.machine import slow

GROUPED = ModelSpec(dim=64, n_layers=4, n_heads=8, n_kv_heads=2, head_dim=16, ffn_dim=336, vocab_size=512)
FLAT = ModelSpec(dim=96, n_layers=2, n_heads=4, n_kv_heads=4, head_dim=32, ffn_dim=160, vocab_size=1024)
OTHER = FLAT.model_copy(update={"vocab_size": 512})
GATED = GROUPED.model_copy(update={"activation": "swiglu", "qk_norm": False})
REPEATED = GROUPED.model_copy(update={"repeats": Repeats(start=1, layers=2, times=3)})
HYBRID = GROUPED.model_copy(update={"mamba": Mamba(layers=[0, 2], chunk=16)})
FILLED = Mamba(layers="all", chunk=64)  # the last chunk of 96 tokens is half empty
UNDECAYED = HYBRID.model_copy(update={"mamba": Mamba(layers=[0, 2], chunk=16, decay=False)})
ALIGNED = {"sequence_length": 64, "teacher": GROUPED, "trainable": ["layers.[02].attention.*"]}
PAIRED = GROUPED.model_copy(update={"layer_pairs": LayerPairs(start=1, layers=2)})
ADAMW = OptimizerSpec(name="adamw", lr=1e-3).resolved({})


class WholeSamples(ListedSamples):
    """Every label is trained on; each of four rows is of another source."""

    def __init__(self, length: int) -> None:
        super().__init__()
        self.length, self.masked = length, False

    def __getitem__(self, index: int) -> Any:
        return SimpleNamespace(**super().__getitem__(index)._asdict(), source=index % 4)


def counted(folder: Path, spec: Any) -> int:
    """Operations of one step."""

    def check(trainer: Any) -> None:
        with flop_counter() as counter:
            trainer.train_step(trainer.batch_generator(trainer.dataloader))
        (folder / "flops").write_text(str(counter.get_total_flops()))

    train(folder, spec, inspect=check, data=lambda: WholeSamples(spec.sequence_length))
    return int((folder / "flops").read_text())


@pytest.mark.parametrize(
    ("kind", "model", "changes"),
    [
        ("pretrain", GROUPED, {"sequence_length": 128}),
        (
            "pretrain",
            FLAT,
            {"sequence_length": 32, "micro_batch_size": 1, "precision": Precision(param="bfloat16")},
        ),
        ("pretrain", GROUPED, {"sequence_length": 64, "activation_checkpointing": "selective"}),
        slow("pretrain", FLAT, {"sequence_length": 256, "activation_checkpointing": "full"}),
        ("sft", GROUPED, {"sequence_length": 64, "lora": Lora(rank=8)}),
        ("pretrain", GATED, {"sequence_length": 64}),
        pytest.param("pretrain", PAIRED, {"sequence_length": 64}, marks=pytest.mark.slow),
        ("pretrain", PAIRED, {"sequence_length": 64, "trainable": ["layers.[12].feed_forward.*"]}),
        slow("pretrain", GATED, {"sequence_length": 64, "activation_checkpointing": "selective"}),
        ("pretrain", REPEATED, {"sequence_length": 64, "activation_checkpointing": "full"}),
        pytest.param(
            "pretrain",
            REPEATED,
            {"sequence_length": 64, "activation_checkpointing": "selective"},
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "pretrain", REPEATED, {"sequence_length": 64, "trainable": ["layers.2.*"]}, marks=pytest.mark.slow
        ),
        pytest.param("sft", REPEATED, {"sequence_length": 64, "lora": Lora(rank=8)}, marks=pytest.mark.slow),
        ("pretrain", HYBRID, {"sequence_length": 64}),
        ("pretrain", HYBRID.model_copy(update={"mamba": FILLED}), {"sequence_length": 96}),
        ("pretrain", UNDECAYED, {"sequence_length": 64}),
        slow("pretrain", UNDECAYED, {"sequence_length": 64, "trainable": ["layers.2.attention.*"]}),
        slow("pretrain", UNDECAYED, {"sequence_length": 64, "activation_checkpointing": "full"}),
        slow("sft", UNDECAYED, {"sequence_length": 64, "lora": Lora(rank=8)}),
        slow("distill", UNDECAYED, {**ALIGNED, "loss": DistillLoss(compare="hidden")}),
        slow("distill", UNDECAYED, {**ALIGNED, "loss": DistillLoss(compare="matrix")}),
        ("sft", HYBRID, {"sequence_length": 64, "lora": Lora(rank=8)}),
        slow("pretrain", HYBRID, {"sequence_length": 64, "activation_checkpointing": "full"}),
        slow("pretrain", HYBRID, {"sequence_length": 64, "activation_checkpointing": "selective"}),
        slow("pretrain", HYBRID, {"sequence_length": 64, "trainable": ["layers.2.attention.*"]}),
        ("distill", GROUPED, {"sequence_length": 64, "teacher": OTHER}),
        slow("distill", HYBRID, {**ALIGNED, "loss": DistillLoss(compare="hidden")}),
        ("distill", HYBRID, {**ALIGNED, "loss": DistillLoss(compare="matrix")}),
        slow("pretrain", GROUPED, {"sequence_length": 64, "trainable": ["layers.[12].*"]}),
        ("pretrain", GATED, {"sequence_length": 64, "trainable": ["layers.2.feed_forward.*"]}),
        pytest.param(
            "pretrain",
            GROUPED,
            {"sequence_length": 64, "trainable": ["*.wo.weight", "norm.weight"]},
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "pretrain",
            GROUPED,
            {"sequence_length": 64, "trainable": ["layers.2.*"], "activation_checkpointing": "full"},
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_step_makes_the_products_that_are_expected(
    tmp_path: Path, kind: str, model: ModelSpec, changes: dict[str, Any]
) -> None:
    spec = segment(kind, model=model, global_batch_size=2, end_step=1, optimizer=ADAMW, **changes)
    expected = spec.tokens_per_step * (flops.training(spec) + flops.recomputation(spec))
    assert counted(tmp_path, spec) == expected


def test_a_step_with_a_gradient_for_each_source_makes_the_products_of_any_other(tmp_path: Path) -> None:
    """The counter knows no inner products of gradients, which a plan counts: 2 k P a step."""
    fields: dict[str, Any] = {"model": GROUPED, "sequence_length": 64, "end_step": 1, "optimizer": ADAMW}
    spec = segment("domain_weights", global_batch_size=4, sources=4, targets=[1], **fields)
    plain = flops.training(segment(global_batch_size=4, **fields))
    assert counted(tmp_path, spec) == spec.tokens_per_step * plain
    activation = 2 * GROUPED.n_layers  # scalars of xIELU, which are not counted
    products = 2 * 3 * (GROUPED.parameters - activation)
    assert flops.training(spec) - plain == products // spec.tokens_per_step


@pytest.mark.parametrize("checkpointing", ["none", "full"])
def test_the_states_of_sums_are_multiplied_and_added_as_often_as_is_expected(
    tmp_path: Path, checkpointing: Any
) -> None:
    """The counter is given a formula for `addcmul_`. The backward pass of a sum is no product: a plan counts
    it as the usual two forward passes, and the counter does not."""
    model = GROUPED.model_copy(update={"depth_average": DepthAverage()})
    spec = segment(
        "pretrain", model=model, sequence_length=64, global_batch_size=2, end_step=1, optimizer=ADAMW,
        activation_checkpointing=checkpointing,
    )  # fmt: skip
    sums = flops.forward(model, 64).sums
    assert sums == 2 * (2 + 3 + 4 + 5) * model.dim
    expected = flops.training(spec) + flops.recomputation(spec) - 2 * sums
    assert counted(tmp_path, spec) == spec.tokens_per_step * expected
