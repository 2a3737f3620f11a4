"""Linear layers in float8: torchao's emulation against the formula, what is converted, training, layouts.

torchao is an extra: pip install apertus[float8]."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from apertus_model.model.float8 import Float8Error, linear_config
from apertus_model.model.model import model_config
from apertus_model.trainer.checkpoint import CheckpointSource
from specs.launch import Parallel
from specs.model import ModelSpec
from specs.settings import Precision
from tests.apertus_model.harness import MODEL, Result, losses, same, segment, train
from tests.apertus_model.trainer.checkpoints import LocalCheckpoint
from tests.machine import slow

KINDS = ("float8", "float8-rowwise", "mxfp8")
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2

HAS_TORCHAO = importlib.util.find_spec("torchao") is not None
needs_torchao = pytest.mark.skipif(not HAS_TORCHAO, reason="no torchao: pip install apertus[float8]")
emulated = pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU multiplies in float8 itself")


def rounded(values: torch.Tensor, kind: torch.dtype, along: int | None) -> torch.Tensor:
    """Values as float8 holds them: divided by one scale for all, or by one (a power of two) for each sum
    along a dimension."""
    largest = values.abs().max() if along is None else values.abs().amax(along, keepdim=True)
    scale = (torch.finfo(kind).max / largest.double()).float()
    if along is not None:
        scale = torch.exp2(torch.floor(torch.log2(scale)))
    return (values * scale).to(kind).float() / scale


def in_blocks(values: torch.Tensor, along: int) -> torch.Tensor:
    """Values as MXFP8 holds them, in float64: each 32 along a dimension are divided by the smallest power of
    two with which none is above 448 (cuBLAS's rule)."""
    blocks = values.double().movedim(along, -1).unflatten(-1, (-1, 32))
    largest = blocks.abs().amax(-1, keepdim=True)
    scale = torch.where(largest > 0, torch.exp2(torch.ceil(torch.log2(largest / 448))), 1.0)
    held = (blocks / scale).to(E4M3).double() * scale
    return held.flatten(-2).movedim(-1, along)


@needs_torchao
@emulated
@pytest.mark.parametrize("kind", KINDS)
def test_products_are_those_of_operands_rounded_to_float8(kind: str) -> None:
    generator = torch.Generator().manual_seed(0)
    x, weight, gradient = (
        torch.randn(*shape, generator=generator) for shape in ((64, 96), (32, 96), (64, 32))
    )
    x[3], weight[5] = 100 * x[3], 30 * weight[5]  # rows that one scale for all would serve badly
    x[7, :32] = 0
    layer = linear_config(kind)(in_features=96, out_features=32).build()
    layer.weight.data.copy_(weight)
    x.requires_grad_()
    y = layer(x)
    y.backward(gradient)
    each = kind == "float8-rowwise"
    backward = E4M3 if each else E5M2

    def q(values: torch.Tensor, along: int, dtype: torch.dtype = E4M3) -> torch.Tensor:
        if kind == "mxfp8":
            return in_blocks(values.detach(), along).float()
        return rounded(values.detach(), dtype, along if each else None)

    close: Callable[..., None] = torch.testing.assert_close
    close(y, q(x, 1) @ q(weight, 1).T, rtol=1e-5, atol=1e-4)
    close(x.grad, q(gradient, 1, backward) @ q(weight, 0), rtol=1e-5, atol=1e-4)
    close(layer.weight.grad, q(gradient, 0, backward).T @ q(x, 0), rtol=1e-5, atol=1e-3)
    exact = x.detach() @ weight.T
    assert 0 < (y - exact).norm() / exact.norm() < 0.05


@needs_torchao
@pytest.mark.parametrize(
    ("activation", "kind", "layer"),
    [
        ("xielu", "float8", "Float8Linear"),
        ("swiglu", "float8", "Float8Linear"),
        ("xielu", "mxfp8", "BlockLinear"),
    ],
)
def test_all_linear_layers_but_the_output_multiply_in_float8_and_weights_stay_as_they_are(
    activation: Any, kind: str, layer: str
) -> None:
    spec = MODEL.model_copy(update={"activation": activation})

    def model(**changes: Any) -> Any:
        built = model_config(spec, sequence_length=16, attention="sdpa", seed=7, **changes).build()
        built.init_weights()
        return built

    plain, converted = model(), model(linear_config=linear_config(kind))
    assert same(dict(converted.state_dict()), dict(plain.state_dict()))
    types = {name: type(part).__name__ for name, part in converted.named_modules()}
    layers = {name.rpartition(".")[2] for name, owner in types.items() if owner == layer}
    gate = {"gate_proj"} if activation == "swiglu" else set()
    assert layers == {"wq", "wk", "wv", "wo", "up_proj", "down_proj"} | gate
    assert types["lm_head"] == "OutputLayer"


def spec_of(kind: str, **changes: Any) -> Any:
    return segment(precision=Precision(param="float32", linear=kind), **changes)  # type: ignore[arg-type]


@needs_torchao
@emulated
@pytest.mark.parametrize("kind", ["float8", slow("float8-rowwise")])
def test_training_in_float8_resumes_with_the_same_bits(tmp_path: Path, kind: str) -> None:
    whole = train(tmp_path / "whole", spec_of(kind), states=True)[0]
    source = CheckpointSource(LocalCheckpoint(tmp_path / "whole" / "step-3"), 3, optimizer=True)
    rest = train(tmp_path / "rest", spec_of(kind), source=source, begin_step=3, states=True)[0]
    assert same(rest.weights, whole.weights)
    assert same(rest.optimizer, whole.optimizer)
    plain = train(tmp_path / "plain", segment())[0]
    assert losses(plain) != losses(whole)
    assert losses(plain) == pytest.approx(losses(whole), rel=0.02)


@needs_torchao
@emulated
def test_a_float8_checkpoint_resumes_in_bfloat16_and_back(tmp_path: Path) -> None:
    """The same tensors, so a stage of either precision starts from a checkpoint of the other."""
    there = train(tmp_path / "there", spec_of("float8", end_step=3))[0]
    assert {tensor.dtype for tensor in there.weights.values()} == {torch.float32}
    source = CheckpointSource(LocalCheckpoint(tmp_path / "there" / "step-3"), 3, optimizer=True)
    back = train(tmp_path / "back", segment(), source=source, begin_step=3)[0]
    assert back.finished and all(torch.isfinite(tensor).all() for tensor in back.weights.values())


WIDE = ModelSpec(
    dim=64, n_layers=2, n_heads=4, n_kv_heads=4, head_dim=16, ffn_dim=128, vocab_size=128, init_std=0.05
)


@needs_torchao
@emulated
@pytest.mark.parametrize("kind", [slow("float8"), "float8-rowwise"])
@pytest.mark.parametrize(
    ("parallel", "alone"),
    [
        (Parallel(), {"micro_batch_size": 2}),  # a rank's rows are a micro-batch there
        (Parallel(tp=2), {}),
        pytest.param(Parallel(tp=2, sequence_parallel=True), {}, marks=pytest.mark.slow),
    ],
)
def test_layouts_train_in_float8_as_one_process_does(
    tmp_path: Path, kind: str, parallel: Parallel, alone: dict[str, Any]
) -> None:
    """Where scales are taken from the same tensors; they are not where micro-batches differ. A rounding
    error then moves some operands to the next float8."""

    def run(name: str, processes: int, **changes: Any) -> Result:
        return train(tmp_path / name, spec_of(kind, model=WIDE, end_step=3, **changes), processes=processes)[
            0
        ]

    one, two = run("one", 1, **alone), run("two", 2, parallel=parallel)
    assert losses(two)[0] == pytest.approx(losses(one)[0], abs=1e-4)
    assert losses(two) == pytest.approx(losses(one), abs=2e-3)


@needs_torchao
@emulated
@pytest.mark.slow
def test_two_processes_train_in_mxfp8_as_one_does(tmp_path: Path) -> None:
    spec = spec_of("mxfp8", model=WIDE, end_step=3, micro_batch_size=2)
    one, two = (train(tmp_path / f"{number}", spec, processes=number)[0] for number in (1, 2))
    assert losses(two)[0] == pytest.approx(losses(one)[0], abs=1e-4)
    assert losses(two) == pytest.approx(losses(one), abs=2e-3)


def test_what_float8_needs_is_said_before_anything_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    here = "apertus_model.model.float8"
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(Float8Error, match=r"needs the package torchao \(pip install apertus\[float8\]\)"):
        linear_config("float8")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: "there")
    monkeypatch.setattr(f"{here}.has_gpu", lambda: False)
    with pytest.raises(
        Float8Error, match="float8 is emulated without a GPU, and torchao cannot compile that"
    ):
        linear_config("float8", compiled=True)
    monkeypatch.setattr(f"{here}.has_gpu", lambda: True)
    monkeypatch.setattr(f"{here}.has_cuda_capability", lambda major, minor: (major, minor) <= (8, 0))
    monkeypatch.setattr(f"{here}.has_rocm_capability", lambda major, minor: False)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda: "NVIDIA A100")
    with pytest.raises(Float8Error, match=r"capability 8\.9 or above .* this one is NVIDIA A100"):
        linear_config("float8-rowwise")
    with pytest.raises(Float8Error, match=r"capability 10\.0 or above .* this one is NVIDIA A100"):
        linear_config("mxfp8")
    if HAS_TORCHAO and not torch.cuda.is_available():
        monkeypatch.setattr(f"{here}.has_cuda_capability", lambda *_: True)
        with pytest.raises(Float8Error, match=r"kernels that torchao 0\.18 has on x86-64 alone"):
            linear_config("mxfp8")
