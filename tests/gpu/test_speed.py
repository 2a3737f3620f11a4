"""A step at the width of Apertus 8B, beside what a rehearsal predicts of it."""

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from apertus_model.rehearsal import fake_cuda
from apertus_model.rehearsal.records import RankTask
from apertus_model.trainer.config import trainer_config
from apertus_model.trainer.lifecycle import Lifecycle
from flows.execution.rehearsal import run_ranks
from flows.planning.estimate import flops
from specs.cluster import GPUS
from specs.recipe import load
from specs.settings import Precision
from specs.stages.pretrain import PretrainStage
from tests.apertus_model.harness import (
    Data,
    FolderStorage,
    Recorder,
    Result,
    SyntheticSamples,
    segment,
)
from tests.e2e.conftest import ROOT
from tests.gpu.conftest import Measured, device, in_one_process, needs_gpus, seconds_of, sheet_of_this_gpu

LAYERS, LENGTH = 4, 4096
MEMORY = 60e9  # weights, gradients and states in float32 of the embeddings and four layers


class Step(NamedTuple):
    seconds: float
    peak: int  # bytes that tensors have


def spec_of(**changes: Any) -> Any:
    stage = load(ROOT / "specs/recipes/apertus-8b.yaml", ()).stages["pretrain"]
    assert isinstance(stage, PretrainStage)
    return segment(
        model=stage.model.model_copy(update={"n_layers": LAYERS}),
        sequence_length=LENGTH,
        global_batch_size=4,
        micro_batch_size=1,
        precision=Precision(param="bfloat16"),
        end_step=100,
        checkpoint={"interval": 100},
        **changes,
    )


def step_of(spec: Any, folder: Path) -> Step:
    lifecycle = Lifecycle(
        begin_step=0,
        source=None,
        storage=FolderStorage(folder, Result()),
        stop_requested=lambda: False,
        scratch=str(folder),
    )
    samples = SyntheticSamples(LENGTH, spec.model.vocab_size, masked=False)
    trainer = trainer_config(spec, Data(samples), Recorder(Result()), lifecycle, world_size=1).build()
    batches = trainer.begin()

    def step() -> None:
        trainer.step += 1
        trainer.train_step(batches)

    seconds = seconds_of(step, repetitions=8)
    peak = torch.cuda.max_memory_allocated()
    trainer.close()
    return Step(seconds, peak)


@needs_gpus()
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_a_step_of_the_8b_takes_what_is_predicted(compiled: bool, tmp_path: Path, measured: Measured) -> None:
    name, spec = sheet_of_this_gpu(), spec_of(compile=compiled)
    if device().memory < MEMORY:
        pytest.skip(f"needs {MEMORY / 1e9:.0f} GB of GPU memory, this one has {device().memory / 1e9:.0f}")
    found = in_one_process(tmp_path, lambda: step_of(spec, tmp_path))
    operations = flops.of_rank(spec, 1, 0)
    measured("tokens per second", f"{spec.tokens_per_step / found.seconds:,.0f}")
    measured("utilisation", f"{operations / found.seconds / GPUS[name].bf16_flops:.1%} of {name} in bfloat16")
    measured("peak memory", f"{found.peak / 1e9:.1f} GB")
    if compiled or not fake_cuda.possible():
        return
    task = RankTask(
        kind="pretrain", segment=spec.model_dump(mode="json"), world_size=1, rank=0, gpu=name, gpus_per_node=8
    )
    expected = run_ranks([task])[0].rehearsed
    assert expected is not None
    measured("predicted seconds of a step", f"{expected.seconds:.3f}; measured: {found.seconds:.3f}")
    measured("rehearsed peak memory", f"{expected.memory.total / 1e9:.1f} GB")
    assert 0.5 < found.seconds / expected.seconds < 2
    assert found.peak == pytest.approx(expected.memory.total, rel=0.1)
