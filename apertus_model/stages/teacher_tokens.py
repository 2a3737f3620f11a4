"""The `teacher_tokens` part of a `distill` stage: what the teacher predicts after each token of the samples
that will be trained on (`data/tokens/teacher_tokens.py` has the format). A unit is a range of samples,
stored as one file.

Invariant: the samples are those of the training segment, in the same order, and the model runs in the
engine and precision of training. The place of a sample in a batch and the division into units change no bit.
"""

from functools import partial

import torch.distributed as dist

from apertus_model.data.order.samples import MixtureSamples
from apertus_model.data.tokens.teacher_tokens import Predicted
from apertus_model.losses.distillation import top_tokens
from apertus_model.progress import Progress
from apertus_model.stages.log_probabilities import as_in_training, missing_units
from apertus_model.stages.training_data import open_mixture
from apertus_model.stop import StopSignal
from apertus_model.trainer.evaluator import Evaluator
from apertus_model.trainer.process import engine_process
from apertus_model.work.units import units_of
from infra.store import Attempt
from specs.stages.distill import TeacherTokensPart


def run(attempt: Attempt, progress: Progress, stop: StopSignal) -> None:
    """Computes the missing units, and commits the artifact."""
    part = TeacherTokensPart.model_validate(attempt.job.spec)
    samples = open_mixture(attempt.store, attempt.job.inputs, part).samples
    with engine_process(threads=attempt.job.launch.cpu_threads):
        evaluator = as_in_training(part, attempt)
        first = dist.get_rank() == 0
        spans = units_of("samples", part.samples, part.samples_per_unit)
        units = {key: range(*span) for key, span in spans.items()}
        for key, span in missing_units(attempt, units, evaluator.device, progress):
            predictions = compute(evaluator, samples, part, span)
            if first:
                path = attempt.workdir / f"{key}.bin"
                with path.open("wb") as file:
                    file.writelines(predicted.to_bytes() for predicted in predictions)
                attempt.commit_unit(key, files={path.name: path})
                path.unlink()
        if first:
            for key in units:
                attempt.adopt(attempt.committed_unit(key), [f"{key}.bin"])
            attempt.commit(
                metrics={"samples": part.samples, "tokens": part.samples * part.sequence_length},
                facts={
                    **{name: getattr(part, name) for name in ("first_sample", "samples", "sequence_length")},
                    "top_k": part.top_k,
                    "samples_per_file": part.samples_per_unit,
                    "files": [f"{key}.bin" for key in units],
                },
            )


def compute(
    evaluator: Evaluator, samples: MixtureSamples, part: TeacherTokensPart, span: range
) -> list[Predicted]:
    """The teacher's predictions for a range of the part's samples, the same on every rank. Collective."""
    rows = [samples[part.first_sample + index] for index in span]

    likeliest = partial(top_tokens, k=part.top_k, temperature=part.temperature)
    words, log_p = evaluator.of_places(rows, likeliest)
    return [Predicted(*both) for both in zip(words.numpy(), log_p.numpy(), strict=True)]
