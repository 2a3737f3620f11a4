"""Norms by layer: of whole tensors in every layout; and what of a flipped bit they and the detector show."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor
from torchtitan.distributed import utils

from apertus_model.trainer.trainer import ApertusTrainer
from specs.launch import Parallel
from specs.optimizer import OptimizerSpec
from tests.apertus_model import harness
from tests.apertus_model.harness import Result, difference, losses, segment, train
from tests.apertus_model.ranks import in_processes
from tests.apertus_model.trainer.layouts import ALL, STEPS, run, spec_of
from tests.machine import slow


def expected(result: Result) -> dict[str, float]:
    """From the tensors in full, in float64, by the names of the parameters."""
    groups: dict[str, list[torch.Tensor]] = {}
    tensors = {f"{name}.weights": value for name, value in result.weights.items()}
    tensors |= {name.removeprefix("state."): value for name, value in result.optimizer.items() if value.ndim}
    for name, tensor in tensors.items():
        parts = name.split(".")
        layer = ".".join(parts[:2]) if parts[0] == "layers" else {"tok_embeddings": "embedding"}.get(parts[0])
        groups.setdefault(f"{parts[-1]}/{layer or 'output'}", []).append(tensor.double().flatten())
    return {name: torch.cat(found).norm().item() for name, found in groups.items()}


@pytest.mark.parametrize(
    "layout", ["one process", slow("HSDP"), "TP with SP", "PP x FSDP", slow("PP interleaved")]
)
def test_norms_are_those_of_whole_tensors_in_every_layout(tmp_path: Path, layout: str) -> None:
    processes, parallel = (1, Parallel()) if layout == "one process" else ALL[layout]
    result = run(tmp_path, spec_of(parallel=parallel, norms_interval=3), processes, states=True)
    assert result.norms.keys() == {3, STEPS}  # at the interval and at the end
    found = result.norms[STEPS]
    assert {"weights/layers.5", "weights/embedding", "exp_avg_slow/output"} <= found.keys()
    assert found == pytest.approx(expected(result), rel=1e-5)


def test_norms_change_no_bit(tmp_path: Path) -> None:
    often, never = (
        train(tmp_path / str(interval), segment(norms_interval=interval), states=True)[0]
        for interval in (1, 0)
    )
    assert (len(often.norms), len(never.norms)) == (6, 0)
    assert harness.same(often.weights, never.weights) and harness.same(often.optimizer, never.optimizer)


# Flipped bits

FLIPPED = 24  # the step before whose clipping a bit flips
EXPONENT, MANTISSA = 30, 12  # the exponent's highest bit; a middle bit of the mantissa


def flipping(target: str, layer: str, bit: int) -> tuple[Callable[..., None], Callable[..., Any]]:
    """`ApertusTrainer.begin` and the clipping of a run in which one bit of a tensor flips: of a parameter of
    the layer, of its gradient, or of its state named `target`."""
    begin, clip = ApertusTrainer.begin, utils.clip_grad_norm_
    trainers: list[ApertusTrainer] = []

    def begins(trainer: ApertusTrainer) -> Any:
        trainers.append(trainer)
        return begin(trainer)

    def clips(*arguments: Any, **options: Any) -> Any:
        (trainer,) = trainers
        if trainer.step == FLIPPED:
            ((name, parameter),) = [
                one for one in trainer.model_parts[0].named_parameters() if one[0] == f"{layer}.weight"
            ]
            tensor = {"weight": parameter.data, "gradient": parameter.grad}.get(target)
            if tensor is None:
                tensor = trainer.optimizers.tensors()[f"state.{name}.{target}"]
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            local.view(torch.int32).view(-1)[7:8].bitwise_xor_(1 << bit)
        return clip(*arguments, **options)

    return begins, clips


STOPS, REPORTED, UNSEEN = "stops", "reported", "unseen"


@pytest.mark.parametrize(
    ("target", "layer", "bit", "outcome"),
    [
        ("weight", "lm_head", EXPONENT, STOPS),
        ("gradient", "lm_head", EXPONENT, STOPS),
        ("exp_avg", "lm_head", EXPONENT, STOPS),
        ("exp_avg_sq", "lm_head", EXPONENT, REPORTED),
        ("weight", "layers.0.attention.qkv_linear.wk", EXPONENT, REPORTED),
        ("weight", "lm_head", MANTISSA, UNSEEN),
        slow("gradient", "lm_head", MANTISSA, UNSEEN),
        slow("exp_avg", "lm_head", MANTISSA, UNSEEN),
        slow("exp_avg_sq", "lm_head", MANTISSA, UNSEEN),
    ],
)
def test_a_flip_of_the_highest_exponent_bit_is_seen_one_of_the_mantissa_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, target: str, layer: str, bit: int, outcome: str
) -> None:
    spec = segment(
        end_step=FLIPPED + 3,
        norms_interval=2,
        optimizer=OptimizerSpec(name="adamw", lr=1e-3).resolved({}),
        checkpoint={"interval": 100},
    )
    sound = train(tmp_path / "sound", spec)[0]
    assert sound.events == []
    begins, clips = flipping(target, layer, bit)
    monkeypatch.setattr(ApertusTrainer, "begin", begins)
    monkeypatch.setattr(utils, "clip_grad_norm_", clips)
    monkeypatch.setattr(harness, "in_kept_processes", in_processes)  # forked now, with the flip
    if outcome == STOPS:
        with pytest.raises(
            RuntimeError, match=r"AnomalyError: step 2[45]: the .* is not finite; training stops"
        ):
            train(tmp_path, spec)
        return
    result = train(tmp_path, spec)[0]
    assert difference(result.weights, sound.weights) > 0  # it did flip
    if outcome == REPORTED:
        assert {event.action for event in result.events} == {"report"}
        assert result.events[0].step == FLIPPED and "is not finite" in result.events[0].text
    else:
        assert result.events == []
        assert losses(result) == pytest.approx(losses(sound), rel=1e-3)
