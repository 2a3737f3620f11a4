"""The `teacher_tokens` part of a `distill` stage: what the teacher predicts after each token of the samples
that will be trained on (`data/tokens/teacher_tokens.py` has the format). A unit is a range of samples,
stored as one file.

Invariant: the samples are those of the training segment, in the same order, and the model runs in the
engine and precision of training. Neither the place of a sample in a batch nor the division into units changes
a bit.
"""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor

from apertus_model.data.order.samples import MixtureSamples
from apertus_model.data.tokens.teacher_tokens import Predicted
from apertus_model.losses.cross_entropy import VocabShard
from apertus_model.losses.distillation import top_tokens
from apertus_model.progress import Progress
from apertus_model.stages.log_probabilities import agreed, as_in_training
from apertus_model.stages.training_data import open_mixture
from apertus_model.stop import StopSignal
from apertus_model.trainer.evaluator import Evaluator
from apertus_model.trainer.process import engine_process
from apertus_model.work.units import units_of
from infra.store import Attempt
from specs.job import Job
from specs.stages.distill import TeacherTokensPart


def run(job: Job, attempt: Attempt, progress: Progress, stop: StopSignal) -> None:
    """Computes the missing units, and commits the artifact."""
    part = TeacherTokensPart.model_validate(job.spec)
    samples = open_mixture(attempt.store, job.inputs, part).samples
    with engine_process(threads=job.launch.threads or 2):
        evaluator = as_in_training(part, job, attempt)
        first = dist.get_rank() == 0
        units = units_of("samples", part.samples, part.samples_per_unit)
        for number, (key, span) in enumerate(units.items(), start=1):
            if not agreed(first and attempt.unit(key) is not None, evaluator.device):
                found = compute(evaluator, samples, part, range(*span))
                if first:
                    path = attempt.workdir / f"{key}.bin"
                    with path.open("wb") as file:
                        file.writelines(one.to_bytes() for one in found)
                    attempt.commit_unit(key, files={path.name: path})
                    path.unlink()
            if first:
                progress.update(number, len(units), "units")
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

    def likeliest(hidden: Tensor, weight: Tensor, _: object, vocab: VocabShard) -> tuple[Tensor, Tensor]:
        return top_tokens(hidden, weight, part.top_k, part.temperature, vocab)

    words, log_p = evaluator.of_places(rows, likeliest)
    return [Predicted(*both) for both in zip(words.numpy(), log_p.numpy(), strict=True)]
