"""The output layer gathers and reduces its weight once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch.distributed.tensor.debug import CommDebugMode

from apertus_model.losses import cross_entropy
from tests.apertus_model.harness import segment, train


def test_the_output_projection_is_gathered_once_and_reduced_once_however_many_chunks_there_are(
    tmp_path: Path,
) -> None:
    def check(trainer: Any) -> None:
        counts = []
        for chunk in (1024, 2):
            cross_entropy.CHUNK_TOKENS = chunk  # `train` resets it
            with CommDebugMode() as collectives:
                trainer.train_step(iter([next(trainer.batch_generator(trainer.dataloader))]))
            counts.append({str(name): number for name, number in collectives.get_comm_counts().items()})
        assert counts[0] == counts[1]
        # layers; embedding; norm and head
        assert sum(number for name, number in counts[0].items() if "reduce_scatter" in name) == 2 + 2

    train(tmp_path, segment(end_step=1), processes=2, inspect=check)
