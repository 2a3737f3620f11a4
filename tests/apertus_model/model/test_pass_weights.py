"""A process alone rounds its weights once a step: the bits are those of FSDP, which does so for each pass."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from apertus_model.model.model import model_config
from apertus_model.model.pass_weights import PassWeights
from specs.layer_schedule import Repeats
from specs.mamba import Mamba
from specs.settings import Lora, Precision
from tests.apertus_model.harness import MODEL, same
from tests.apertus_model.trainer.layouts import DEEP, run, spec_of
from tests.machine import slow

HALVES = {"micro_batch_size": 4}  # two micro-batches a step
ROUNDED = {"precision": Precision(param="bfloat16")}


def deep(**changes: Any) -> dict[str, Any]:
    return {"model": DEEP.model_copy(update=changes)}


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("pretrain", HALVES),
        slow("pretrain", {**HALVES, "activation_checkpointing": "full"}),
        slow("pretrain", {"precision": Precision(param="bfloat16", linear="float8")}),
        slow("pretrain", deep(repeats=Repeats(start=1, layers=2, times=2))),
        slow("pretrain", deep(mamba=Mamba(layers=[0]))),
        slow("sft", {**HALVES, "lora": Lora(rank=2, alpha=4)}),
        slow("sft", {**HALVES, "trainable": ["lm_head", "layers.5.*"]}),
    ],
)
def test_bits_are_those_of_fsdp(tmp_path: Path, kind: str, changes: dict[str, Any]) -> None:
    spec = spec_of(kind, **{**ROUNDED, **changes})
    alone, expected = (run(tmp_path / str(fsdp), spec, states=True, fsdp=fsdp) for fsdp in (False, True))
    for name in ("loss", "grad_norm"):
        assert [row[name] for row in alone.rows] == [row[name] for row in expected.rows]
    assert alone.heldout == expected.heldout
    assert same(alone.weights, expected.weights) and same(alone.optimizer, expected.optimizer)


def rounded_model(**settings: Any) -> Any:
    model = model_config(MODEL, sequence_length=16, attention="sdpa", **settings).build()
    model.init_states()
    model.pass_weights = PassWeights(model, torch.bfloat16)
    return model


TOKENS = torch.arange(16)[None]


def test_a_pass_outside_is_an_error() -> None:
    model = rounded_model()
    with pytest.raises(AssertionError, match=r"torch\.bfloat16: enter `in_use` before it"):
        model(TOKENS)
    with model.in_passes():
        assert model(TOKENS).dtype == torch.bfloat16


class Copied(TorchDispatchMode):
    """Counts the numbers that are rounded."""

    numbers = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._foreach_copy_.default:
            self.numbers += sum(tensor.numel() for tensor in args[0])
        elif func is torch.ops.aten._to_copy.default and result.dtype == torch.bfloat16:
            self.numbers += result.numel()
        return result


@pytest.mark.parametrize("lora", [None, Lora(rank=2, alpha=4)])
def test_weights_are_rounded_once_a_step_and_frozen_ones_once(lora: Lora | None) -> None:
    model = rounded_model(lora=lora)
    trained = sum(weight.numel() for weight in model.parameters() if weight.requires_grad)
    steps = []
    for _ in range(3):
        with Copied() as copied, model.in_passes(), model.in_passes():  # the inner one changes nothing
            pass
        steps.append(copied.numbers)
    assert steps == [sum(weight.numel() for weight in model.parameters()), trained, trained]


def test_passes_see_what_the_weights_are_and_gradients_add_up_in_float32() -> None:
    model = rounded_model()
    weights = dict(model.named_parameters())
    with model.in_passes():
        assert [name for name, _ in model.named_parameters()] == list(weights)
    with torch.no_grad():
        weights["norm.weight"].fill_(1 + 2**-10)  # rounded to 1
    for times in (1, 2):
        with model.in_passes():
            assert (model.norm.weight == 1).all()
            model(TOKENS).float().sum().backward()
            assert all(weight.grad is None for weight in model.parameters())
        assert dict(model.named_parameters()) == weights
        gradient = weights["norm.weight"].grad
        assert gradient is not None and gradient.dtype == torch.float32
        if times == 1:
            first = gradient.clone()
    assert (gradient == 2 * first).all() and gradient.abs().sum() > 0
