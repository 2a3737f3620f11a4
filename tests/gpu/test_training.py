"""Training steps of the real trainer on GPUs: resumed, compiled, and in every layout that the GPUs allow."""

from pathlib import Path
from typing import Any

import pytest

from apertus_model.trainer.checkpoint import CheckpointSource
from specs.launch import Parallel
from specs.model import ModelSpec
from specs.settings import Precision
from tests.apertus_model.harness import Result, SyntheticSamples, difference, losses, same, segment, train
from tests.apertus_model.trainer.checkpoints import LocalCheckpoint
from tests.apertus_model.trainer.layouts import ALL
from tests.gpu.conftest import Measured, device, needs_gpus, number_of_gpus

MODEL = ModelSpec(
    dim=256, n_layers=6, n_heads=4, n_kv_heads=2, head_dim=64, ffn_dim=512, vocab_size=256, init_std=0.05
)
LENGTH = 256


class Samples(SyntheticSamples):
    asked: tuple[int, ...] = ()

    def __init__(self) -> None:
        super().__init__(length=LENGTH, masked=False)


def spec_of(**changes: Any) -> Any:
    fields = {
        "model": MODEL,
        "sequence_length": LENGTH,
        "global_batch_size": 8,
        "end_step": 4,
        "precision": Precision(param="bfloat16"),
        "checkpoint": {"interval": 2},
    }
    return segment(**{**fields, **changes})


def run(folder: Path, processes: int = 1, source: CheckpointSource | None = None, **changes: Any) -> Result:
    arguments = {"begin_step": source.step, "source": source} if source is not None else {}
    results = train(folder, spec_of(**changes), processes=processes, data=Samples, **arguments)  # type: ignore[arg-type]
    for result in results[1:]:
        results[0].weights |= result.weights
    return results[0]


@pytest.mark.slow
def test_training_resumes_to_the_same_bits(tmp_path: Path, measured: Measured) -> None:
    whole = run(tmp_path / "whole")
    rest = run(
        tmp_path / "rest",
        source=CheckpointSource(LocalCheckpoint(tmp_path / "whole" / "step-2"), 2, optimizer=True),
    )
    measured("losses", ", ".join(f"{loss:.3f}" for loss in losses(whole)))
    assert losses(whole)[-1] < losses(whole)[0]
    assert losses(rest) == losses(whole)[2:]
    assert same(rest.weights, whole.weights)


@needs_gpus()
@pytest.mark.parametrize("recomputation", ["none", "selective", "full"])
def test_compiled_layers_train_as_eager_ones(recomputation: str, tmp_path: Path, measured: Measured) -> None:
    eager = run(tmp_path / "eager", activation_checkpointing=recomputation)
    compiled = run(tmp_path / "compiled", activation_checkpointing=recomputation, compile=True)
    found = max(abs(a - b) for a, b in zip(losses(eager), losses(compiled), strict=True))
    measured("largest difference of a loss, in nats", f"{found:.1e}")
    assert found < 2e-2


@needs_gpus()
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("linear", ["float8", "float8-rowwise"])
def test_float8_trains_nearly_as_bfloat16(
    linear: str, compiled: bool, tmp_path: Path, measured: Measured
) -> None:
    if device().capability < (8, 9):
        pytest.skip(f"{device().name} has no float8")
    plain = run(tmp_path / "plain")
    rough = run(tmp_path / "rough", precision=Precision(param="bfloat16", linear=linear), compile=compiled)
    found = max(abs(a - b) for a, b in zip(losses(plain), losses(rough), strict=True))
    measured("largest difference of a loss, in nats", f"{found:.1e}")
    assert found < 0.1


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Result:
    """One GPU that takes the whole batch at once."""
    return run(tmp_path_factory.mktemp("alone"), precision=Precision(param="float32"))


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=needs_gpus(processes)) for name, (processes, _) in ALL.items()]
)
def test_a_layout_over_nccl_trains_as_one_gpu(
    name: str, alone: Result, tmp_path: Path, measured: Measured
) -> None:
    processes, parallel = ALL[name]
    precision = Precision(param="float32")
    together = run(tmp_path, processes, parallel=parallel, micro_batch_size=2, precision=precision)
    found = max(abs(a - b) for a, b in zip(losses(alone), losses(together), strict=True))
    measured("largest difference of a loss, in nats", f"{found:.1e}")
    measured("largest difference of a weight", f"{difference(alone.weights, together.weights):.1e}")
    assert found < 1e-3


@needs_gpus(2)
def test_all_gpus_share_one_model(tmp_path: Path, measured: Measured) -> None:
    number = number_of_gpus()
    result = run(tmp_path, number, parallel=Parallel(), global_batch_size=2 * number)
    measured("GPUs", number)
    assert losses(result)[-1] < losses(result)[0]
