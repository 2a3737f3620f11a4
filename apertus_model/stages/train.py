"""Training: one segment of a training stage of any kind, on the torchtitan engine.

Artifact: checkpoints, each with the metrics up to it; the manifest names the one at the segment's end.

Invariants:
- The job states what to begin from: a checkpoint of this very trajectory (`resume_step`), a parent's
  checkpoint, or new weights. Nothing is looked for in the attempt's own folder.
- A checkpoint states which data it was trained on, and is resumed only with the same data.
- A failure after a commit does not undo the commit: old checkpoints that cannot be removed stay.
"""

import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import asdict
from statistics import median_high
from typing import Any

import torch.distributed as dist

from apertus_model.progress import Progress
from apertus_model.stages.training_data import TrainingData, open_data, same_data
from apertus_model.stop import StopSignal
from apertus_model.tracking import Tracker
from apertus_model.trainer.anomalies import AnomalyState
from apertus_model.trainer.checkpoint import CheckpointSource, Commit, Saved
from apertus_model.trainer.checkpoint_writer import CheckpointWriter
from apertus_model.trainer.config import trainer_config
from apertus_model.trainer.evaluator import HeldOutLoss
from apertus_model.trainer.hang import SLOW_FACTOR, HangWatch
from apertus_model.trainer.lifecycle import Lifecycle
from apertus_model.trainer.metrics import Row
from apertus_model.trainer.process import engine_process
from infra.store import Artifact, Attempt, Checkpoint, Store, StoreError
from infra.store.writing.lease import LeaseLost
from infra.store.writing.retention import prune
from specs.anomalies import Event, StoredEvent
from specs.stages import segment_of
from specs.stages.training import Segment

logger = logging.getLogger(__name__)

Facts = dict[str, Any]
"""The facts in the marker of a checkpoint; `SegmentCheckpoints.prepare_commit` lists them."""

# prefix of the units that store the event at which an attempt stopped, since no checkpoint follows it
STOP = "stop-"
# columns of a row that are not copied into the facts of a checkpoint
NOT_A_FACT = ("step", "tokens", "tokens_per_second", "time")
# facts of the resumed checkpoint that replace the last row until the first step is done
RESUMED_METRICS = ("loss", "grad_norm", "lr", "masked_share")
# facts that are not copied into the metrics of the manifest
NOT_METRICS = ("passes", "data", "anomalies", "checkpoints", "objective")


def run(attempt: Attempt, progress: Progress, stop: StopSignal) -> None:
    """Trains the segment to its end, or to a stop, which leaves a checkpoint and no manifest."""
    launch = attempt.job.launch
    if launch.stop_before_end is not None:
        stop.before_end(launch.stop_before_end.seconds)
    hang_seconds = launch.hang_timeout.seconds if launch.hang_timeout else None
    with engine_process(launch.cpu_threads) as world_size:
        rank = int(os.environ["RANK"])
        with closing(HangWatch(attempt.job.scratch, rank, hang_seconds)) as watch:
            _train(attempt, progress, stop, watch, world_size)


def _train(attempt: Attempt, progress: Progress, stop: StopSignal, watch: HangWatch, world_size: int) -> None:
    watch.heartbeat(SLOW_FACTOR)
    job = attempt.job
    segment = segment_of(job.kind).model_validate(job.spec)
    first_rank = os.environ["RANK"] == "0"
    data = open_data(attempt.store, job.inputs, segment)
    tracker = Tracker.open(job) if first_rank else Tracker({})
    facts: Facts = {}
    if job.resume_step is not None:
        facts = attempt.artifact.checkpoint(job.resume_step).facts
        same_data(
            {**data.identity, "samples": segment.sample_at(job.resume_step)},
            {**facts["data"], "samples": facts["samples"]},
            job.resume_step,
        )
    anomalies: AnomalyState = facts.get("anomalies", {})
    recorder = SegmentRecorder(attempt, progress, segment, tracker, resumed=facts)
    if first_rank and (
        stops := [event for event in _stop_events(attempt) if event not in anomalies.get("events", [])]
    ):
        recorder.rows += map(recorder.row_of_event, stops)
        anomalies = {**anomalies, "events": [*anomalies.get("events", []), *stops]}
        facts = facts | {"anomalies": anomalies}
    before = attempt.input_checkpoint("parent").facts if "parent" in job.inputs else {}
    checkpoints = SegmentCheckpoints(
        attempt, progress, segment, data, recorder, resumed=facts, passes_before=before.get("passes", {})
    )
    continued = facts if job.resume_step is not None else before if segment.start_step > 0 else {}
    lifecycle = Lifecycle(
        begin_step=job.resume_step if job.resume_step is not None else segment.start_step,
        source=starting_point(segment, attempt),
        storage=checkpoints,
        stop_requested=lambda: stop.requested,
        scratch=job.scratch,
        anomalies=anomalies,
        objective=continued.get("objective", {}),
        first_step_done=stop.cooperate,
        watch=watch,
        checkpoint_of=attempt.input_checkpoint,
    )
    trainer = trainer_config(segment, data, recorder, lifecycle, world_size=world_size).build()
    try:
        finished = trainer.train()
    finally:
        trainer.close()
        tracker.close()
    if finished and dist.get_rank() == 0:
        last = checkpoints.facts
        attempt.commit(
            step=segment.end_step,
            metrics={name: fact for name, fact in last.items() if name not in NOT_METRICS}
            | trainer.config.objective.results(),
            facts={
                "checkpoints": last["checkpoints"],
                "anomalies": last.get("anomalies", {}).get("events", []),
                **last.get("objective", {}),
            },
        )


def starting_point(segment: Segment, attempt: Attempt) -> CheckpointSource | None:
    """The checkpoint to load; None for new weights.

    A segment that continues its phase takes over everything; the first segment of a phase takes the weights,
    with the adapters that the parent has added to them, and whatever else `carry` names.
    """
    if (step := attempt.job.resume_step) is not None:
        return CheckpointSource(attempt.artifact.checkpoint(step), step, optimizer=True)
    if "parent" not in attempt.job.inputs:
        return None
    parent = attempt.input_checkpoint("parent")
    continues = segment.start_step > 0
    return CheckpointSource(
        parent,
        parent.step,
        optimizer=continues or "optimizer" in segment.carry,
        new_adapters=not continues,
        new_parameters=() if continues else segment.new_parameters,
    )


class SegmentRecorder:
    """Forwards the trainer's reports to the launcher and the tracker, and keeps them for the next checkpoint.

    Only rank 0 keeps reports. `resumed`: facts of the checkpoint that the attempt resumes from."""

    def __init__(
        self, attempt: Attempt, progress: Progress, segment: Segment, tracker: Tracker, resumed: Facts
    ) -> None:
        self._attempt, self._progress, self._segment = attempt, progress, segment
        self._tracker = tracker
        self._speeds: list[float] = []
        self._heldout: dict[str, float] = resumed.get("validation", {})
        self._heldout_step: int | None = resumed.get("validation_step")
        self._last: Row = {name: resumed[name] for name in resumed if name in RESUMED_METRICS}
        self.rows: list[dict[str, Any]] = []  # rows of the history that no checkpoint has taken yet

    def add_step(self, row: Row) -> None:
        self._add(row)
        self._last = row
        self._speeds.append(row["tokens_per_second"])
        segment = self._segment
        self._progress.update(
            row["step"] - segment.start_step,
            segment.end_step - segment.start_step,
            "steps",
            **{name: row[name] for name in ("step", "loss", "lr", "grad_norm", "tokens_per_second")},
        )

    def add_heldout(self, step: int, losses: Mapping[str, HeldOutLoss]) -> None:
        if dist.get_rank() != 0:
            return
        self._heldout = {name: round(loss.nats, 6) for name, loss in losses.items()}
        self._heldout_step = step
        self._add({"step": step, "validation": self._heldout})
        text = ", ".join(f"{name} {nats:.3f}" for name, nats in self._heldout.items())
        self._progress.log(f"step {step}: held-out loss {text}")

    def add_norms(self, step: int, norms: Mapping[str, float]) -> None:
        if dist.get_rank() == 0:
            self._add({"step": step, "norms": dict(norms)})

    def add_anomaly(self, event: Event) -> None:
        """Takes an event, a skipped or reported step; committed at once if training stops there."""
        if dist.get_rank() != 0:
            return
        self._add(self.row_of_event(asdict(event)))
        self._progress.log(event.text)
        if event.action == "stop":
            with _storage_errors_logged(f"the event of step {event.step} was not stored"):
                self._attempt.commit_unit(f"{STOP}{event.step:08d}", data=asdict(event))

    def row_of_event(self, event: StoredEvent) -> dict[str, Any]:
        """An anomaly as a row of the history."""
        return {"step": event["step"], "tokens": self._segment.tokens_at(event["step"]), "anomaly": event}

    def facts(self) -> Facts:
        """The facts of a checkpoint about the last step and the last held-out losses."""
        speed = median_high(self._speeds) if self._speeds else 0.0
        return {
            **{name: value for name, value in self._last.items() if name not in NOT_A_FACT},
            "tokens_per_second": round(speed, 1),
            "ms_per_step": round(1e3 * self._segment.tokens_per_step / speed, 2) if speed else 0.0,
            "validation": self._heldout,
            "validation_step": self._heldout_step,
        }

    def take_rows(self) -> list[dict[str, Any]]:
        """The rows since the last call."""
        rows, self.rows = self.rows, []
        return rows

    def _add(self, row: dict[str, Any]) -> None:
        self.rows.append(row)
        self._tracker.write(row)


class SegmentCheckpoints:
    """The storage of a segment's checkpoints: commits them with their facts, and removes those that are not
    kept. Only the uploading thread writes to the attempt.

    `resumed`: facts of the checkpoint that the attempt resumes from. `passes_before`: passes over each corpus
    in the parent's training, by the corpus's fingerprint."""

    def __init__(
        self,
        attempt: Attempt,
        progress: Progress,
        segment: Segment,
        data: TrainingData,
        recorder: SegmentRecorder,
        *,
        resumed: Facts,
        passes_before: Mapping[str, float],
    ) -> None:
        self._attempt, self._progress, self._segment = attempt, progress, segment
        self._data, self._recorder, self._passes_before = data, recorder, passes_before
        self._uploads = Store(attempt.store.fs, attempt.store.root)  # training does not wait for its requests
        self._best = BestCheckpoints(segment.checkpoint.best)
        self.facts = resumed  # facts of the last committed checkpoint

    def writer(self, step: int) -> CheckpointWriter:
        return CheckpointWriter(self._uploads, self._attempt.folder(self._attempt.checkpoint_folder(step)))

    def committed(self, step: int) -> Checkpoint:
        return self._attempt.artifact.checkpoint(step)

    def timed(self) -> AbstractContextManager[None]:
        return self._attempt.store.timed()

    def prepare_commit(self, step: int, anomalies: AnomalyState, objective: Mapping[str, Any]) -> Commit:
        segment, data = self._segment, self._data
        samples = segment.sample_at(step)
        facts: Facts = {
            "tokens": segment.tokens_at(step),
            "samples": samples,
            "data": data.identity,
            "epochs": dict(zip(data.names, data.samples.epochs(samples), strict=True)),
            "passes": self._passes(samples),
            "anomalies": anomalies,
            **self._recorder.facts(),
        }
        if objective:
            facts["objective"] = dict(objective)
        rows = self._recorder.take_rows()
        return lambda saved: self._commit(saved, facts, rows)

    def _commit(self, saved: Saved, facts: Facts, rows: list[dict[str, Any]]) -> None:
        """Commits a checkpoint that every rank has written. Runs in the thread that uploads."""
        attempt, spec = self._attempt, self._segment.checkpoint
        cost = {
            "stall_seconds": saved.stall_seconds,
            "upload_seconds": saved.upload_seconds,
            "bytes": saved.bytes,
        }
        rounded = {name: round(value, 4) for name, value in cost.items()}
        for row in [*rows, {"step": saved.step, "checkpoint": rounded}]:
            attempt.add_metrics(row)
        before = self.facts.get("checkpoints", {})
        totals = {
            name: round(before.get(name, 0) + value, 4) for name, value in {"number": 1, **cost}.items()
        }
        facts = facts | {"checkpoints": totals}
        self._best.add(attempt.commit_checkpoint(saved.step, facts, files=saved.files))
        self.facts = facts
        loss = f", loss {facts['loss']:.4f}" if "loss" in facts else ""
        self._progress.log(
            f"step {saved.step}: checkpoint committed{loss}; training waited {saved.stall_seconds:.2f} s,"
            f" {saved.bytes / 1e6:.1f} MB were written in {saved.upload_seconds:.2f} s"
        )
        with _storage_errors_logged(f"step {saved.step}: older checkpoints stay until the next commit"):
            best = self._best.steps(attempt.artifact)
            rollback_from = self._segment.anomalies.rollback_from(saved.step, self._segment.start_step)
            prune(
                attempt.artifact,
                keep=spec.keep,
                kept=lambda step: spec.kept(step) or step in best or rollback_from <= step,
                before=attempt.check_lease,
            )

    def _passes(self, samples: int) -> dict[str, float]:
        """The passes over each corpus since the weights were new, by fingerprint, to report memorisation."""
        data, passes = self._data, dict(self._passes_before)
        begin, end = data.samples.epochs(self._segment.sample_offset), data.samples.epochs(samples)
        for corpus, before, after in zip(data.fingerprints, begin, end, strict=True):
            passes[corpus] = passes.get(corpus, 0.0) + after - before
        return passes


class BestCheckpoints:
    """For each metric (`Checkpoint.validation_loss`), the committed checkpoint with the lowest value.

    Each marker is read once, so that the cost of a commit does not grow with the number of checkpoints; a
    checkpoint whose marker cannot be read has no value."""

    def __init__(self, metrics: list[str]) -> None:
        self._metrics = metrics
        self._losses: dict[int, dict[str, float | None]] = {}

    def add(self, checkpoint: Checkpoint) -> None:
        """Notes the losses of a committed checkpoint."""
        self._losses[checkpoint.step] = {
            metric: checkpoint.validation_loss(metric) for metric in self._metrics
        }

    def steps(self, artifact: Artifact) -> set[int]:
        """The steps of the best checkpoints; of equal ones, the first."""
        committed = sorted(artifact.checkpoint_steps()) if self._metrics else []
        for step in committed:
            if step in self._losses:
                continue
            try:
                self.add(artifact.checkpoint(step))
            except StoreError as error:
                logger.warning("%s", error)
                self._losses[step] = dict.fromkeys(self._metrics)
        best: set[int] = set()
        for metric in self._metrics:
            losses = {step: loss for step in committed if (loss := self._losses[step][metric]) is not None}
            best |= {min(losses, key=lambda step: losses[step])} if losses else set()
        return best


def _stop_events(attempt: Attempt) -> Iterator[StoredEvent]:
    """Yields the events at which earlier attempts at this part stopped, in the order of steps."""
    with _storage_errors_logged("events at which an earlier attempt stopped are left out"):
        for name in attempt.store.names(f"{attempt.job.path}/units"):
            if name.startswith(STOP) and (unit := attempt.unit(name.removesuffix(".json"))) is not None:
                yield unit.data


@contextmanager
def _storage_errors_logged(consequence: str) -> Iterator[None]:
    """A context in which a storage failure is logged and training goes on. A lost lease is still an error."""
    try:
        yield
    except LeaseLost:
        raise
    except (StoreError, OSError) as error:
        logger.warning("%s: %s: %s", consequence, type(error).__name__, error)
