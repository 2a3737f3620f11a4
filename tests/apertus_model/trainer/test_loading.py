"""A model from a checkpoint, without an optimizer."""

from __future__ import annotations

from pathlib import Path

import torch
from torchtitan.config import CommConfig
from torchtitan.distributed import ParallelDims
from torchtitan.distributed import utils as dist_utils

from apertus_model.trainer.config import parallelism_config
from apertus_model.trainer.loading import load_model
from specs.launch import Parallel
from tests.apertus_model.harness import MODEL, segment, train
from tests.apertus_model.ranks import in_processes
from tests.apertus_model.trainer.checkpoints import LocalCheckpoint


def test_weights_that_are_stored_as_they_are_used_give_the_same_bits(tmp_path: Path) -> None:
    """On two processes, which gather what each stores."""
    train(tmp_path, segment(end_step=1, checkpoint={"interval": 1}))

    def logits(rank: int) -> list[torch.Tensor]:
        world = dist_utils.init_distributed(CommConfig(), base_folder=str(tmp_path))
        parallelism = parallelism_config(Parallel())
        dims = ParallelDims.from_config(parallelism, world)
        found = []
        for stored in ("float32", "bfloat16"):
            model = load_model(
                MODEL, LocalCheckpoint(tmp_path / "step-1"), sequence_length=16, attention="sdpa",
                parallelism=parallelism, dims=dims, device=torch.device("cpu"), dtype="bfloat16",
                scratch=str(tmp_path), stored_dtype=stored,
            )  # fmt: skip
            assert {str(parameter.dtype) for parameter in model.parameters()} == {f"torch.{stored}"}
            with torch.no_grad():
                found.append(model(torch.arange(16)[None] + rank))
        return found

    for rank, (wide, narrow) in enumerate(in_processes(tmp_path / "ranks", logits, 2)):
        assert wide.dtype == torch.bfloat16 and torch.equal(wide, narrow), rank
