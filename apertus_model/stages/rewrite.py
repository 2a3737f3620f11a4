"""The `rewrite` stage: a checkpoint whose model is computed in another way.

Artifact: a manifest without files, with the metrics `layers`, the number that run for a token, and `steps`,
the number that run one after the other. Stages that start from it read the checkpoint itself.
"""

from apertus_model.progress import Progress
from apertus_model.stop import StopSignal
from infra.store import Attempt
from specs.stages.rewrite import RewritePart


def run(attempt: Attempt, progress: Progress, stop: StopSignal) -> None:
    """Stores the number of layers that run, and the number of steps in which they run."""
    model = RewritePart.model_validate(attempt.job.spec).model
    steps = len(model.schedule)
    progress.log(f"{model.layer_runs} layers in {steps} steps")
    attempt.commit(metrics={"layers": model.layer_runs, "steps": steps})
