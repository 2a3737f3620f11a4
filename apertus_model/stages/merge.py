"""The `merge` stage: merges the weights of several checkpoints into one model.

Artifact: checkpoint 1, with weights and no optimizer states. The adapters of a checkpoint are merged into its
weights first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from apertus_model.progress import Progress
from apertus_model.stop import StopSignal
from apertus_model.trainer.checkpoint_writer import CheckpointWriter
from apertus_model.trainer.merging import merge_checkpoints
from apertus_model.trainer.process import engine_process
from infra.store import Attempt
from specs.job import Job
from specs.stages.merge import MergePart

RESULT = 1  # the step of the checkpoint


def run(job: Job, attempt: Attempt, progress: Progress, stop: StopSignal) -> None:
    """Merges the checkpoints, and commits the result."""
    part = MergePart.model_validate(job.spec)
    writer = CheckpointWriter(attempt.store, attempt.folder(attempt.checkpoint_folder(RESULT)))
    parents = [attempt.input_checkpoint(f"checkpoint:{index}") for index in range(len(part.weights))]

    def on_tensor(done: int, total: int) -> None:
        if dist.get_rank() == 0:
            progress.update(done, total, "tensors")

    with engine_process(threads=job.launch.threads or 2):
        with attempt.store.timed():
            merge_checkpoints(
                part,
                parents,
                attempt.input_checkpoint("base") if part.method != "average" else None,
                writer=writer,
                step=RESULT,
                scratch=job.scratch,
                on_tensor=on_tensor,
            )
        if dist.get_rank() == 0:
            facts = facts_of([parent.facts for parent in parents])
            attempt.commit_checkpoint(RESULT, facts, files=writer.records)
            attempt.commit(step=RESULT, metrics={"checkpoints": len(parents), "tokens": facts["tokens"]})


def facts_of(parents: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The facts of the merged model: each count is the largest one among the checkpoints."""
    passes: dict[str, float] = {}
    for facts in parents:
        for source, seen in facts["passes"].items():
            passes[source] = max(passes.get(source, 0.0), seen)
    return {"tokens": max(facts["tokens"] for facts in parents), "passes": passes}
