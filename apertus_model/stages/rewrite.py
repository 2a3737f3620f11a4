"""The `rewrite` stage: a checkpoint whose model is computed in another way.

Artifact: a manifest without files, with the metrics `layers`, how many run for a token, and `steps`, how many
of them one after the other. Stages that start from it read the checkpoint itself.
"""

from __future__ import annotations

from apertus_model.progress import Progress
from apertus_model.stop import StopSignal
from infra.store import Attempt
from specs.job import Job
from specs.stages.rewrite import RewritePart


def run(job: Job, attempt: Attempt, progress: Progress, stop: StopSignal) -> None:
    """Stores how many layers run, and in how many steps."""
    model = RewritePart.model_validate(job.spec).model
    steps = len(model.schedule)
    progress.log(f"{model.layer_runs} layers in {steps} steps")
    attempt.commit(metrics={"layers": model.layer_runs, "steps": steps})
