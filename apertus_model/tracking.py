"""Sends the rows of training to TensorBoard and to Weights & Biases as they are recorded.

A part (`pretrain/2`) is one curve over all its attempts; the names of TensorBoard's event files and the
settings of the run on Weights & Biases name the attempts. The store keeps the rows as well.

Invariant: a step is shown once. An attempt that resumes from a checkpoint hides later steps of the attempt
before it (TensorBoard), or is silent until it passes them (Weights & Biases keeps the first values; the rows
are equal). The last shown step is read from the service or, offline, from the files: a killed attempt loses
unwritten rows.
"""

from __future__ import annotations

import logging
import struct
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from specs.job import Job
from specs.tracking import WandbSpec

logger = logging.getLogger(__name__)

STEP, TIME = "step", "time"
FLUSH_SECONDS = 1.0  # between writes to files; a killed attempt loses at most these rows
WANDB_HEADER, WANDB_BLOCK = b":W&B\xe1\xbe\x00", 32_768


class Tracker:
    """All sinks of an attempt. One that fails is reported once and left out: tracking never ends a stage."""

    def __init__(self, sinks: dict[str, MetricsSink]) -> None:
        self._sinks = sinks

    @classmethod
    def open(cls, job: Job) -> Tracker:
        """The sinks of a job. `job.resume_step` is the last step that is not repeated."""
        makers: dict[str, Callable[[], MetricsSink]] = {}
        if (tensorboard := job.tracking.tensorboard) is not None:
            folder = Path(tensorboard) / job.pipeline / job.node
            makers["TensorBoard"] = lambda: TensorBoard(folder, job.attempt, job.resume_step)
        if (wandb := job.tracking.wandb) is not None:
            makers["Weights & Biases"] = lambda: WeightsAndBiases(wandb, job)
        tracker = cls({})
        for name, make in makers.items():
            try:
                tracker._sinks[name] = make()
            except Exception as error:
                tracker._leave_out(name, error)
        return tracker

    def write(self, row: dict[str, Any]) -> None:
        """Sends a row of metrics: `{"step", "loss", ...}`. Only numbers are included."""
        flat: dict[str, Any] = {}
        for name, value in row.items():
            nested = isinstance(value, dict)
            flat |= {f"{name}/{key}": item for key, item in value.items()} if nested else {name: value}
        values = {
            name: float(value)
            for name, value in flat.items()
            if name not in (STEP, TIME) and isinstance(value, (int, float)) and not isinstance(value, bool)
        }
        self._each(lambda sink: sink.write(row[STEP], values, row.get(TIME) or time.time()))

    def close(self) -> None:
        """Delivers pending rows."""
        self._each(lambda sink: sink.close())

    def _each(self, call: Callable[[MetricsSink], None]) -> None:
        for name, sink in list(self._sinks.items()):
            try:
                call(sink)
            except Exception as error:
                self._leave_out(name, error)

    def _leave_out(self, name: str, error: Exception) -> None:
        self._sinks.pop(name, None)
        logger.warning("%s gets no more metrics of this attempt: %s: %s", name, type(error).__name__, error)


class TensorBoard:
    """One event file per attempt in the folder of the part. `after`: the last earlier step that stays."""

    def __init__(self, folder: Path, attempt: str, after: int | None) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._event = Event
        self._writer = EventFileWriter(str(folder), flush_secs=FLUSH_SECONDS, filename_suffix=f".{attempt}")
        if after is not None:  # TensorBoard drops this step and later ones of earlier files
            self._writer.add_event(
                Event(wall_time=time.time(), step=after + 1, session_log=SessionLog(status=SessionLog.START))
            )

    def write(self, step: int, values: dict[str, float], seconds: float) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary

        summary = Summary(
            value=[Summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        )
        self._writer.add_event(self._event(wall_time=seconds, step=step, summary=summary))

    def close(self) -> None:
        self._writer.close()


class WeightsAndBiases:
    """One run per trajectory, by its fingerprint, in the group of the pipeline."""

    def __init__(self, spec: WandbSpec, job: Job) -> None:
        import wandb

        folder = Path(spec.folder)
        folder.mkdir(parents=True, exist_ok=True)
        kept = last_kept_step(folder, job.fingerprint) if spec.mode == "offline" else -1
        self._run = wandb.init(
            project=spec.project,
            entity=spec.entity,
            mode=spec.mode,
            dir=str(folder),
            id=job.fingerprint,
            resume="allow",
            group=job.pipeline,
            job_type=job.kind,
            name=job.node,
            config={
                "spec": job.spec,
                "launch": job.launch.to_json(),
                "store": job.store,
                "path": job.path,
                "attempt": job.attempt,
            },
            allow_val_change=True,
            save_code=False,
            settings=wandb.Settings(
                console="off",
                silent=True,
                disable_git=True,
                disable_code=True,
                x_disable_meta=True,
                x_transaction_log_flush_interval=FLUSH_SECONDS,
            ),
        )
        self._shown = self._run.step - 1 if self._run.resumed else kept

    def write(self, step: int, values: dict[str, float], seconds: float) -> None:
        if step > self._shown:
            self._run.log(values, step=step)

    def close(self) -> None:
        import wandb

        self._run.finish()
        wandb.teardown()  # its own process writes the end of the file after `finish` has returned


MetricsSink = TensorBoard | WeightsAndBiases


def last_kept_step(folder: Path, name: str) -> int:
    """The last step in the offline files of a run of Weights & Biases, for `wandb sync`; -1 without any."""
    from wandb.proto.wandb_internal_pb2 import Record  # type: ignore[attr-defined]  # chosen at import

    last = -1
    for file in folder.glob(f"*/*run-*-{name}/run-{name}.wandb"):  # folder/wandb/offline-run-<time>-<name>
        for data in _wandb_records(file):
            record = Record.FromString(data)
            if record.HasField("history"):
                last = max(last, record.history.step.num)
    return last


def _wandb_records(path: Path) -> Iterator[bytes]:
    """The records of a file in LevelDB's log format, up to the first incomplete one. Records are in pieces
    that do not cross blocks: CRC-32, length, kind (1 whole, 2 first, 3 middle, 4 last), bytes. ValueError for
    a file of another version."""
    data, place, record = path.read_bytes(), len(WANDB_HEADER), b""
    if not WANDB_HEADER.startswith(data[:place]):
        raise ValueError(
            f"{path} begins with {data[:place]!r}, not with {WANDB_HEADER!r}: wandb writes another format now"
        )
    while place + 7 <= len(data):
        if (left := WANDB_BLOCK - place % WANDB_BLOCK) < 7:
            place += left
            continue
        checksum, length, kind = struct.unpack_from("<IHB", data, place)
        if zlib.crc32(data[place + 6 : place + 7 + length]) != checksum:
            return
        record += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):
            yield record
            record = b""
