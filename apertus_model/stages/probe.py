"""The `probe` stage: measures of a checkpoint that concern no task.

Artifact: `metrics.json`, the same numbers as in the manifest; `sharpness` and `activations` of
`apertus_model.evaluation` list them.
"""

import torch

from apertus_model.evaluation.activations import sparsity
from apertus_model.evaluation.perplexity import held_out
from apertus_model.evaluation.sharpness import sharpness
from apertus_model.progress import Progress
from apertus_model.stop import StopSignal
from apertus_model.trainer.inference import load_evaluator
from apertus_model.trainer.process import engine_process
from infra.store import Attempt
from specs.stages.probe import ProbePart


def run(attempt: Attempt, progress: Progress, stop: StopSignal) -> None:
    """Measures, and stores the metrics."""
    part = ProbePart.model_validate(attempt.job.spec)
    with engine_process(threads=attempt.job.launch.cpu_threads):
        with attempt.store.timed():
            evaluator = load_evaluator(
                part.model,
                attempt.input_checkpoint("checkpoint"),
                sequence_length=part.sequence_length,
                attention=part.attention,
                parallel=attempt.job.launch.degrees,
                batch_size=part.batch_size,
                scratch=attempt.job.scratch,
            )
        first = torch.distributed.get_rank() == 0
        sources = [attempt.input_artifact(role) for role in attempt.job.inputs if role.startswith("source:")]
        samples = [
            sample
            for source in sources
            for sample in held_out(source, sequence_length=part.sequence_length, samples=part.samples)
        ]
        metrics = sparsity(evaluator, samples) if part.activations else {}
        if part.sharpness is not None:
            shown = progress if first else Progress(None)
            metrics |= sharpness(evaluator, samples, **part.sharpness.model_dump(), progress=shown)
        if first:
            for name, value in metrics.items():
                progress.log(f"{name}: {value:.4g}")
            attempt.write_json("metrics.json", metrics)
            attempt.commit(metrics=metrics)
