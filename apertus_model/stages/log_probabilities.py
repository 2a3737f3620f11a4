"""The `log_probabilities` stage: those of the pairs under the reference model, once for the whole training.

Artifact: `log_probabilities.npy`, float32 of shape (sequences,): sum of ln p over the tokens of a sequence's
completion, by sequence id. A unit is a range of packed rows in stored order; its data are the
log-probabilities of their sequences.

Invariant: the rows, the engine and the precision are those of the training, so that with the same layout,
threads and rows per forward pass its first step has log-ratios of exactly zero. Neither the place of a row in
a batch nor the division into units changes a bit.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist

from apertus_model.collectives import of_first_rank
from apertus_model.progress import Progress
from apertus_model.stages.training_data import sides_of
from apertus_model.stop import StopSignal
from apertus_model.trainer.evaluator import Evaluator
from apertus_model.trainer.inference import load_evaluator
from apertus_model.trainer.process import engine_process
from apertus_model.work.units import units_of
from infra.store import Attempt
from specs.stages.distill import TeacherTokensPart
from specs.stages.preference_data import LogProbabilitiesPart

if TYPE_CHECKING:
    from apertus_model.data.preferences.samples import PreferenceSamples


def run(attempt: Attempt, progress: Progress, stop: StopSignal) -> None:
    """Computes the missing units, and commits the artifact."""
    from apertus_model.data.preferences.samples import PreferenceSamples

    part = LogProbabilitiesPart.model_validate(attempt.job.spec)
    pairs = attempt.input_artifact("pairs")
    pad_id, sides = pairs.manifest.facts["pad_id"], sides_of(attempt.job.inputs["pairs"])
    length = part.sequence_length
    rows = PreferenceSamples.open(pairs, None, sequence_length=length, pad_id=pad_id, sides=sides)
    with engine_process(threads=attempt.job.launch.cpu_threads):
        evaluator = as_in_training(part, attempt)
        first = dist.get_rank() == 0
        spans = units_of("rows", rows.rows, part.sequences_per_unit)
        units = {key: range(*span) for key, span in spans.items()}
        for key, span in missing_units(attempt, units, evaluator.device, progress):
            unit = compute(evaluator, rows, span)
            if first:
                attempt.commit_unit(key, data=unit)
        if first:
            commit(attempt, rows, units)


def missing_units(
    attempt: Attempt, units: Mapping[str, range], device: torch.device, progress: Progress
) -> Iterator[tuple[str, range]]:
    """Yields the units that are not committed yet, the same on every rank. The first rank commits each one
    before the next is asked for. Collective."""
    first = dist.get_rank() == 0
    for number, (key, span) in enumerate(units.items(), start=1):
        if not of_first_rank(first and attempt.unit(key) is not None, device):
            yield key, span
        if first:
            progress.update(number, len(units), "units")


def as_in_training(part: LogProbabilitiesPart | TeacherTokensPart, attempt: Attempt) -> Evaluator:
    """The model of a part, in the engine and the precision of training. Collective."""
    with attempt.store.timed():
        return load_evaluator(
            part.model,
            attempt.input_checkpoint("checkpoint"),
            sequence_length=part.sequence_length,
            attention=part.attention,
            parallel=part.parallel,
            batch_size=part.batch_size,
            scratch=attempt.job.scratch,
            dtype=part.precision.param,
            same_length=True,
        )


def compute(evaluator: Evaluator, rows: PreferenceSamples, span: range) -> dict[str, Any]:
    """The data of the unit of a range of rows: `values`, the log-probabilities of their sequences in the
    order of rows and segments, and `tokens`, the number of tokens."""
    samples = [rows.row(row) for row in span]
    sums = evaluator.of_sequences(samples, samples[0].present.size)
    values = sums[torch.from_numpy(np.stack([sample.present for sample in samples]))]
    return {"values": values.tolist(), "tokens": sum(int((sample.segments >= 0).sum()) for sample in samples)}


def commit(attempt: Attempt, rows: PreferenceSamples, units: dict[str, range]) -> None:
    """Joins the units and commits the artifact. StoreError when a unit is gone."""
    values = np.zeros(rows.sequences, np.float32)
    tokens = 0
    for key, span in units.items():
        unit = attempt.committed_unit(key)
        values[np.concatenate([rows.sequence_ids(row) for row in span])] = unit.data["values"]
        tokens += unit.data["tokens"]
    np.save(attempt.workdir / "log_probabilities.npy", values)
    attempt.put(attempt.workdir / "log_probabilities.npy", "log_probabilities.npy")
    mean = float(values.sum(dtype=np.float64)) / tokens
    attempt.commit(metrics={"sequences": rows.sequences, "tokens": tokens, "log_probability_per_token": mean})
