"""Training and validation steps never hold the logits of all their tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from specs.launch import Parallel
from tests.apertus_model.harness import (
    MODEL,
    Data,
    PreferenceRows,
    SyntheticSamples,
    WeightedSamples,
    segment,
    train,
)
from tests.apertus_model.live_memory import LiveMemory
from tests.machine import slow

WORDS, TOKENS = 4096, 128
DATA: dict[str, Any] = {"qrpo": PreferenceRows, "sft": WeightedSamples}


@pytest.mark.parametrize(
    ("processes", "parallel"), [(1, Parallel()), slow(2, Parallel()), (2, Parallel(tp=2))]
)
@pytest.mark.parametrize("kind", [slow("pretrain"), slow("sft"), "qrpo"])
def test_no_step_makes_a_tensor_of_all_tokens_by_the_vocabulary(
    tmp_path: Path, kind: str, processes: int, parallel: Parallel
) -> None:
    """The largest tensor is what FSDP gathers with the output projection, (4096 + 1) x 32 elements; the
    logits of a chunk are 8 x 4096."""
    spec = segment(
        kind,
        end_step=1,
        model=MODEL.model_copy(update={"vocab_size": WORDS}),
        global_batch_size=8,
        parallel=parallel,
        **({"prompt_weight": 0.25} if kind == "sft" else {}),
    )

    def check(trainer: Any) -> None:
        logits = TOKENS * WORDS // processes
        batch = next(trainer.batch_generator(trainer.dataloader))
        tokens = batch[0]["input"]
        trainer.config.data = Data(
            SyntheticSamples(), {"text": [SyntheticSamples()[index] for index in range(8)]}
        )
        for work in (lambda: trainer.train_step(iter([batch])), trainer.heldout_losses):
            with LiveMemory() as memory:
                work()
            assert 8 * WORDS // parallel.tp <= memory.largest <= (WORDS + 1) * MODEL.dim < logits
        with LiveMemory() as memory, torch.no_grad():
            trainer.model_parts[0](tokens)
        assert memory.largest >= logits  # where they are asked for

    kinds = {"data": DATA[kind]} if kind in DATA else {}
    train(tmp_path, spec, processes=processes, inspect=check, chunk_tokens=8, **kinds)


@pytest.mark.parametrize("schedule", ["1f1b", slow("gpipe")])
def test_the_last_stage_of_a_pipeline_has_a_chunk_of_logits_and_the_others_none(
    tmp_path: Path, schedule: Any
) -> None:
    model = MODEL.model_copy(update={"vocab_size": WORDS})
    spec = segment(
        end_step=1, model=model, global_batch_size=8, parallel=Parallel(pp=2, pp_schedule=schedule)
    )

    def check(trainer: Any) -> None:
        batches = trainer.batch_generator(trainer.dataloader)
        trainer.config.data = Data(
            SyntheticSamples(), {"text": [SyntheticSamples()[index] for index in range(8)]}
        )
        for work in (lambda: trainer.train_step(batches), trainer.heldout_losses):
            with LiveMemory() as memory:
                work()
            assert memory.largest <= (WORDS + 1) * MODEL.dim < TOKENS * WORDS
            assert not trainer.pp_has_last_stage or memory.largest >= 8 * WORDS

    train(tmp_path, spec, processes=2, inspect=check, chunk_tokens=8)
