"""Training: one segment of a stage that trains, of any kind, on the torchtitan engine.

Artifact: checkpoints, each with the rows of metrics up to it; the manifest names the one at the segment's end.

Invariants: what to begin from is the launcher's choice, stated in the job: a checkpoint of this very trajectory (`resume_*`), a
parent's, or new weights. Nothing is looked for in the attempt's own folder. A checkpoint states which data it was trained on, and is gone
on from with the same data only.
"""

from __future__ import annotations

import os
from typing import Any

import torch.distributed as dist

from apertus_model.progress import Progress
from apertus_model.stages.training_data import TrainingData, open_data, same_data
from apertus_model.stop import StopSignal
from apertus_model.tracking import Tracker
from apertus_model.trainer.checkpoint import Source
from apertus_model.trainer.config import RunHooks, trainer_config
from apertus_model.trainer.heldout import HeldOutLoss
from apertus_model.trainer.process import engine_process
from infra.store import Artifact, Attempt
from specs.job import Job
from specs.launch import Launch
from specs.stages.dpo import DpoSegment
from specs.stages.qrpo import QrpoSegment
from specs.stages.sft import SftSegment
from specs.stages.training import Segment

SEGMENTS: dict[str, type[Segment]] = {"sft": SftSegment, "qrpo": QrpoSegment, "dpo": DpoSegment}  # the others train on a mixture
STATE_OF_A_ROW = ("step", "tokens", "tokens_per_second", "time")


def run(job: Job, attempt: Attempt, progress: Progress, stop: StopSignal) -> None:
    """Trains the segment to its end, or until a stop is asked for, which leaves a checkpoint and no manifest."""
    segment = SEGMENTS.get(job.kind, Segment).model_validate(job.spec)
    with engine_process(threads=Launch.model_validate(job.launch).threads or 2) as world_size:
        data = open_data(attempt.store, job.inputs, segment)
        tracker = Tracker.open(job) if os.environ["RANK"] == "0" else Tracker({})
        report = Report(attempt, progress, segment, data, tracker)
        if job.resume_step is not None:
            facts = attempt.artifact.checkpoint(job.resume_step).facts
            same_data(
                {**data.identity, "samples": segment.sample_at(job.resume_step)},
                {**facts["data"], "samples": facts["samples"]},
                job.resume_step,
            )
            report.go_on(facts)
        report.passes_before = passes_of_parent(job, attempt)
        hooks = RunHooks(
            open_samples=lambda: data.samples,
            heldout=data.heldout,
            source=starting_point(job, segment, attempt),
            begin_step=job.resume_step if job.resume_step is not None else segment.start_step,
            checkpoint_location=lambda step: attempt.location(attempt.checkpoint_folder(step)),
            commit=report.commit_checkpoint,
            record=report.add_step,
            record_heldout=report.add_heldout,
            stop_requested=lambda: stop.requested,
            scratch=job.scratch,
            timed=attempt.store.timed,
        )
        trainer = trainer_config(segment, hooks, world_size=world_size).build()
        try:
            finished = trainer.train()
        finally:
            trainer.close()
            tracker.close()
        if finished and dist.get_rank() == 0:
            attempt.commit(
                step=segment.end_step, metrics={name: fact for name, fact in report.facts.items() if name not in ("passes", "data")}
            )


def starting_point(job: Job, segment: Segment, attempt: Attempt) -> Source | None:
    """The checkpoint to load; None for new weights.

    A segment that goes on within its leg takes over everything; the first one of a leg the weights, with what adapters the parent has
    added to them, and what else `carry` says.
    """
    if job.resume_step is not None:
        assert job.resume_checkpoint is not None, "the launcher gives step and folder"
        return Source(attempt.store.location(job.resume_checkpoint), job.resume_step, optimizer=True)
    parent = job.inputs.get("parent")
    if parent is None:
        return None
    assert parent.checkpoint is not None and parent.step is not None, "the launcher gives step and folder"
    chained = segment.start_step > 0
    return Source(
        attempt.store.location(parent.checkpoint),
        parent.step,
        optimizer=chained or "optimizer" in segment.carry,
        new_adapters=not chained,
    )


def passes_of_parent(job: Job, attempt: Attempt) -> dict[str, float]:
    """Passes over all that was trained on, by fingerprint, on the way to the checkpoint that the segment begins with."""
    parent = job.inputs.get("parent")
    if parent is None:
        return {}
    assert parent.path is not None and parent.step is not None, "the launcher gives folder and step"
    passes: dict[str, float] = Artifact(attempt.store, parent.path).checkpoint(parent.step).facts["passes"]
    return passes


class Report:
    """Turns what the engine reports into history, progress and facts. Only rank 0 is told of steps and checkpoints."""

    def __init__(self, attempt: Attempt, progress: Progress, segment: Segment, data: TrainingData, tracker: Tracker) -> None:
        self._attempt = attempt
        self._tracker = tracker
        self._progress = progress
        self._segment = segment
        self._data = data
        self._speeds: list[float] = []
        self._heldout: dict[str, Any] = {}
        self._heldout_step: int | None = None
        self._last: dict[str, Any] = {}
        self.facts: dict[str, Any] = {}
        self.passes_before: dict[str, float] = {}

    def go_on(self, facts: dict[str, Any]) -> None:
        """The segment goes on from its own checkpoint with these facts."""
        self.facts = facts
        self._heldout, self._heldout_step = facts["validation"], facts.get("validation_step")

    def _record(self, row: dict[str, Any]) -> None:
        self._attempt.add_metrics(row)
        self._tracker.write(row)

    def add_step(self, row: dict[str, Any]) -> None:
        """A step is done."""
        self._record(row)
        self._last = row
        self._speeds.append(row["tokens_per_second"])
        segment = self._segment
        self._progress.update(
            row["step"] - segment.start_step,
            segment.end_step - segment.start_step,
            "steps",
            **{name: row[name] for name in ("step", "loss", "lr", "grad_norm", "tokens_per_second")},
        )

    def add_heldout(self, step: int, losses: dict[str, HeldOutLoss]) -> None:
        """Held-out losses were measured."""
        if dist.get_rank() != 0:
            return
        self._heldout = {name: round(loss.nats, 6) for name, loss in losses.items()}
        self._heldout_step = step
        self._record({"step": step, "validation": self._heldout})
        told = ", ".join(f"{name} {nats:.3f}" for name, nats in self._heldout.items())
        self._progress.log(f"step {step}: held-out loss {told}")

    def commit_checkpoint(self, step: int) -> None:
        """Every rank has written its part of the checkpoint of `step`."""
        segment = self._segment
        samples = segment.sample_at(step)
        self.facts = {
            "tokens": segment.tokens_at(step),
            "samples": samples,
            "data": self._data.identity,
            "epochs": dict(zip(self._data.names, self._data.samples.epochs(samples), strict=True)),
            "passes": self._passes(samples),
            **{name: value for name, value in self._last.items() if name not in STATE_OF_A_ROW},
            "tokens_per_second": round(_median(self._speeds), 1),
            "validation": self._heldout,
            "validation_step": self._heldout_step,
        }
        self._attempt.commit_checkpoint(step, self.facts, files=self._attempt.sealed_checkpoint(step))
        best = best_steps(self._attempt.artifact, segment.checkpoint.best)
        self._attempt.prune(segment.checkpoint.keep, {*segment.checkpoint.milestones, *best})
        self._progress.log(f"step {step}: checkpoint committed, loss {self._last['loss']:.4f}")

    def _passes(self, samples: int) -> dict[str, float]:
        """Passes over each source since the weights were new: what memorisation is compared with."""
        data, passes = self._data, dict(self.passes_before)
        begin, end = data.samples.epochs(self._segment.sample_offset), data.samples.epochs(samples)
        for corpus, before, after in zip(data.fingerprints, begin, end, strict=True):
            passes[corpus] = passes.get(corpus, 0.0) + after - before
        return passes


def best_steps(artifact: Artifact, metrics: list[str]) -> set[int]:
    """For each metric (`Checkpoint.validation_loss`), the step of the committed checkpoint with the lowest value; the first of equals."""
    checkpoints = [artifact.checkpoint(step) for step in sorted(artifact.checkpoint_steps())] if metrics else []
    best: set[int] = set()
    for metric in metrics:
        losses = {checkpoint.step: loss for checkpoint in checkpoints if (loss := checkpoint.validation_loss(metric)) is not None}
        best |= {min(losses, key=lambda step: losses[step])} if losses else set()
    return best


def _median(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]
