"""Training: one segment of a stage that trains, of any kind, on the torchtitan engine.

Artifact: checkpoints, each with the rows of metrics up to it; the manifest names the one at the segment's end.

Invariants: what to begin from is the launcher's choice, stated in the job: a checkpoint of this very trajectory (`resume_*`), a
parent's, or new weights. Nothing is looked for in the attempt's own folder. A checkpoint states which data it was trained on, and is gone
on from with the same data only. What is committed is not lost to what comes after it: old checkpoints that cannot be removed stay.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

import torch.distributed as dist

from apertus_model.progress import Progress
from apertus_model.stages.training_data import TrainingData, open_data, same_data
from apertus_model.stop import StopSignal
from apertus_model.tracking import Tracker
from apertus_model.trainer.anomalies import Event
from apertus_model.trainer.checkpoint import Saved, Source
from apertus_model.trainer.config import RunHooks, trainer_config
from apertus_model.trainer.hang import SLOW, HangWatch
from apertus_model.trainer.heldout import HeldOutLoss
from apertus_model.trainer.process import engine_process
from apertus_model.trainer.upload import CheckpointWriter
from infra.store import Artifact, Attempt, Checkpoint, Store, StoreError
from infra.store.writing.lease import LeaseLost
from infra.store.writing.retention import prune
from specs.job import Job
from specs.launch import Launch
from specs.stages.dpo import DpoSegment
from specs.stages.qrpo import QrpoSegment
from specs.stages.sft import SftSegment
from specs.stages.training import Segment

logger = logging.getLogger(__name__)

SEGMENTS: dict[str, type[Segment]] = {"sft": SftSegment, "qrpo": QrpoSegment, "dpo": DpoSegment}  # the others train on a mixture
STOP = "stop-"  # begins the keys of units that hold an event at which an attempt stopped: no checkpoint comes after it
STATE_OF_A_ROW = ("step", "tokens", "tokens_per_second", "time")
NOT_METRICS = ("passes", "data", "anomalies", "checkpoints")  # facts of a checkpoint that the manifest states elsewhere, or not


def run(job: Job, attempt: Attempt, progress: Progress, stop: StopSignal) -> None:
    """Trains the segment to its end, or until a stop is asked for, which leaves a checkpoint and no manifest."""
    segment = SEGMENTS.get(job.kind, Segment).model_validate(job.spec)
    launch = Launch.model_validate(job.launch)
    if launch.stop_before_end is not None:
        stop.before_end(launch.stop_before_end.seconds)
    with engine_process(threads=launch.threads or 2) as world_size:
        watch = HangWatch(job.scratch, int(os.environ["RANK"]), launch.hang_timeout.seconds if launch.hang_timeout else None)
        try:
            _train(job, attempt, progress, stop, segment, watch, world_size)
        finally:
            watch.close()


def _train(job: Job, attempt: Attempt, progress: Progress, stop: StopSignal, segment: Segment, watch: HangWatch, world_size: int) -> None:
    watch.alive(SLOW)
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
    report.recall_stops()
    report.passes_before = passes_of_parent(job, attempt)
    uploads = Store(attempt.store.fs, attempt.store.root)  # its seconds are not those that training waits
    hooks = RunHooks(
        open_samples=lambda: data.samples,
        heldout=data.heldout,
        source=starting_point(job, segment, attempt),
        begin_step=job.resume_step if job.resume_step is not None else segment.start_step,
        checkpoint_writer=lambda step: CheckpointWriter(uploads, attempt.folder(attempt.checkpoint_folder(step))),
        prepare_commit=report.prepare_commit,
        committed=attempt.artifact.checkpoint,
        record=report.add_step,
        record_heldout=report.add_heldout,
        record_anomaly=report.add_anomaly,
        anomalies=report.facts.get("anomalies", {}),
        stop_requested=lambda: stop.requested,
        begun=stop.cooperate,
        scratch=job.scratch,
        timed=attempt.store.timed,
        watch=watch,
    )
    trainer = trainer_config(segment, hooks, world_size=world_size).build()
    try:
        finished = trainer.train()
    finally:
        trainer.close()
        tracker.close()
    if finished and dist.get_rank() == 0:
        metrics = {name: fact for name, fact in report.facts.items() if name not in NOT_METRICS}
        facts = {"checkpoints": report.facts["checkpoints"], "anomalies": report.facts.get("anomalies", {}).get("events", [])}
        attempt.commit(step=segment.end_step, metrics=metrics, facts=facts)


def starting_point(job: Job, segment: Segment, attempt: Attempt) -> Source | None:
    """The checkpoint to load; None for new weights.

    A segment that goes on within its phase takes over everything; the first one of a phase the weights, with what adapters the parent has
    added to them, and what else `carry` says.
    """
    if job.resume_step is not None:
        return Source(attempt.artifact.checkpoint(job.resume_step), job.resume_step, optimizer=True)
    if "parent" not in job.inputs:
        return None
    parent = attempt.input_checkpoint("parent")
    chained = segment.start_step > 0
    return Source(
        parent,
        parent.step,
        optimizer=chained or "optimizer" in segment.carry,
        new_adapters=not chained,
    )


def passes_of_parent(job: Job, attempt: Attempt) -> dict[str, float]:
    """Passes over all that was trained on, by fingerprint, on the way to the checkpoint that the segment begins with."""
    passes: dict[str, float] = attempt.input_checkpoint("parent").facts["passes"] if "parent" in job.inputs else {}
    return passes


class Report:
    """Turns what the engine reports into history, progress and facts. Only rank 0 is told of steps and checkpoints.

    `facts` are those of the last checkpoint that was committed. Rows wait here for the checkpoint whose history they are: the attempt is
    touched by one thread, the one that commits."""

    def __init__(self, attempt: Attempt, progress: Progress, segment: Segment, data: TrainingData, tracker: Tracker) -> None:
        self._attempt = attempt
        self._tracker = tracker
        self._progress = progress
        self._segment = segment
        self._data = data
        self._rows: list[dict[str, Any]] = []
        self._speeds: list[float] = []
        self._heldout: dict[str, Any] = {}
        self._heldout_step: int | None = None
        self._last: dict[str, Any] = {}
        self.facts: dict[str, Any] = {}
        self.passes_before: dict[str, float] = {}
        self._best = Best(segment.checkpoint.best)

    def go_on(self, facts: dict[str, Any]) -> None:
        """The segment resumes from its own checkpoint with these facts."""
        self.facts = facts
        self._heldout, self._heldout_step = facts["validation"], facts.get("validation_step")

    def recall_stops(self) -> None:
        """Events at which earlier attempts stopped come into the history and the facts, unless the checkpoint has them."""
        state: dict[str, Any] = self.facts.get("anomalies", {})
        known = state.get("events", [])
        stops = [event for event in _stops(self._attempt) if event not in known] if os.environ["RANK"] == "0" else []
        self._rows += map(self._row_of, stops)
        if stops:
            self.facts = self.facts | {"anomalies": state | {"events": [*known, *stops]}}

    def _row_of(self, event: dict[str, Any]) -> dict[str, Any]:
        return {"step": event["step"], "tokens": self._segment.tokens_at(event["step"]), "anomaly": event}

    def _note(self, row: dict[str, Any]) -> None:
        """Keeps a row for the next checkpoint, and shows it."""
        self._rows.append(row)
        self._tracker.write(row)

    def add_step(self, row: dict[str, Any]) -> None:
        """A step is done."""
        self._note(row)
        self._last = row
        self._speeds.append(row["tokens_per_second"])
        segment = self._segment
        self._progress.update(
            row["step"] - segment.start_step,
            segment.end_step - segment.start_step,
            "steps",
            **{name: row[name] for name in ("step", "loss", "lr", "grad_norm", "tokens_per_second")},
        )

    def add_anomaly(self, event: Event) -> None:
        """A step was not taken. Where training stops, the event is committed by itself."""
        if dist.get_rank() != 0:
            return
        self._note(self._row_of(asdict(event)))
        self._progress.log(event.text)
        if event.action == "stop":
            with _told(f"the event of step {event.step} was not stored"):
                self._attempt.commit_unit(f"{STOP}{event.step:08d}", data=asdict(event))

    def add_heldout(self, step: int, losses: dict[str, HeldOutLoss]) -> None:
        """Held-out losses were measured."""
        if dist.get_rank() != 0:
            return
        self._heldout = {name: round(loss.nats, 6) for name, loss in losses.items()}
        self._heldout_step = step
        self._note({"step": step, "validation": self._heldout})
        told = ", ".join(f"{name} {nats:.3f}" for name, nats in self._heldout.items())
        self._progress.log(f"step {step}: held-out loss {told}")

    def prepare_commit(self, step: int, anomalies: dict[str, Any]) -> Callable[[Saved], None]:
        """The state of `step` is copied: what is said of it is what is known now."""
        segment = self._segment
        samples = segment.sample_at(step)
        last = self._last or {name: fact for name, fact in self.facts.items() if name in ("loss", "grad_norm", "lr", "masked_share")}
        facts = {
            "tokens": segment.tokens_at(step),
            "samples": samples,
            "data": self._data.identity,
            "epochs": dict(zip(self._data.names, self._data.samples.epochs(samples), strict=True)),
            "passes": self._passes(samples),
            **{name: value for name, value in last.items() if name not in STATE_OF_A_ROW},
            "tokens_per_second": round(_median(self._speeds), 1) if self._speeds else 0.0,
            "validation": self._heldout,
            "validation_step": self._heldout_step,
        }
        if anomalies:
            facts["anomalies"] = anomalies
        rows, self._rows = self._rows, []
        return lambda saved: self._commit(saved, facts, rows)

    def _commit(self, saved: Saved, facts: dict[str, Any], rows: list[dict[str, Any]]) -> None:
        """Every rank has written its part. In the thread of the upload."""
        attempt, spec = self._attempt, self._segment.checkpoint
        cost = {"stall_seconds": saved.stall_seconds, "upload_seconds": saved.upload_seconds, "bytes": saved.bytes}
        for row in [*rows, {"step": saved.step, "checkpoint": {name: round(value, 4) for name, value in cost.items()}}]:
            attempt.add_metrics(row)
        before = self.facts.get("checkpoints", {})
        totals = {name: round(before.get(name, 0) + value, 4) for name, value in {"number": 1, **cost}.items()}
        self._best.add(attempt.commit_checkpoint(saved.step, facts | {"checkpoints": totals}, files=saved.files))
        self.facts = facts | {"checkpoints": totals}
        loss = f", loss {facts['loss']:.4f}" if "loss" in facts else ""
        self._progress.log(
            f"step {saved.step}: checkpoint committed{loss}; training stood still for {saved.stall_seconds:.2f} s, "
            f"{saved.bytes / 1e6:.1f} MB were written in {saved.upload_seconds:.2f} s"
        )
        with _told(f"step {saved.step}: older checkpoints stay until the next commit"):
            best = self._best.steps(attempt.artifact)
            back = self._segment.anomalies.rollback_from(saved.step, self._segment.start_step)
            prune(
                attempt.artifact,
                keep=spec.keep,
                kept=lambda step: spec.kept(step) or step in best or back <= step,
                before=attempt.check_lease,
            )

    def _passes(self, samples: int) -> dict[str, float]:
        """Passes over each source since the weights were new: what memorisation is compared with."""
        data, passes = self._data, dict(self.passes_before)
        begin, end = data.samples.epochs(self._segment.sample_offset), data.samples.epochs(samples)
        for corpus, before, after in zip(data.fingerprints, begin, end, strict=True):
            passes[corpus] = passes.get(corpus, 0.0) + after - before
        return passes


class Best:
    """For each metric (`Checkpoint.validation_loss`), the committed checkpoint with the lowest value. A marker is read once, so that what a
    commit costs does not grow with the steps that are kept; one that cannot be read has no value."""

    def __init__(self, metrics: list[str]) -> None:
        self._metrics = metrics
        self._losses: dict[int, dict[str, float | None]] = {}

    def add(self, checkpoint: Checkpoint) -> None:
        """Notes what a committed checkpoint has."""
        self._losses[checkpoint.step] = {metric: checkpoint.validation_loss(metric) for metric in self._metrics}

    def steps(self, artifact: Artifact) -> set[int]:
        """Steps of the best; of equals the first."""
        there = sorted(artifact.checkpoint_steps()) if self._metrics else []
        for step in there:
            if step in self._losses:
                continue
            try:
                self.add(artifact.checkpoint(step))
            except StoreError as error:
                logger.warning("%s", error)
                self._losses[step] = dict.fromkeys(self._metrics)
        best: set[int] = set()
        for metric in self._metrics:
            losses = {step: loss for step in there if (loss := self._losses[step][metric]) is not None}
            best |= {min(losses, key=lambda step: losses[step])} if losses else set()
        return best


def _stops(attempt: Attempt) -> Iterator[dict[str, Any]]:
    """The events at which attempts at this part stopped, in the order of steps."""
    with _told("events at which an earlier attempt stopped are left out"):
        for name in attempt.store.names(f"{attempt.job.path}/units"):
            if name.startswith(STOP) and (unit := attempt.unit(name.removesuffix(".json"))) is not None:
                yield unit.data


@contextmanager
def _told(consequence: str) -> Iterator[None]:
    """For work that training does not depend on: storage that fails at it is told of in the log. Losing the lease is an error still."""
    try:
        yield
    except LeaseLost:
        raise
    except (StoreError, OSError) as error:
        logger.warning("%s: %s: %s", consequence, type(error).__name__, error)


def _median(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]
