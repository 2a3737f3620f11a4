"""Rows of training in TensorBoard and Weights & Biases: each step once, whatever happened in between."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from apertus_model.tracking import Tracker, last_kept_step
from specs.job import Job
from tests.jobs import job_at

NODE = "pretrain/2"


def _job(attempt: str, tracking: dict[str, Any], resume_step: int | None = None) -> Job:
    path = "pretrain/" + "a" * 32
    fields = {"spec": {"sequence_length": 8}, "resume_step": resume_step, "tracking": tracking}
    return job_at(path, "store", Path("nowhere"), attempt, pipeline="mini", node=NODE, **fields)


def _rows(first: int, last: int) -> list[dict[str, Any]]:
    return [
        {"step": step, "loss": 10.0 - step, "time": 1000.0 + step, "attempt": "text"}
        for step in range(first, last + 1)
    ]


def _stopped(tracking: dict[str, Any]) -> None:
    """Steps 1 to 7, of which 5 were in a checkpoint."""
    stopped = Tracker.open(_job("first", tracking))
    for row in _rows(1, 7):
        stopped.write(row)
    stopped.close()


def _gone_on(tracking: dict[str, Any]) -> None:
    """Steps 6 to 9, with a validation after 8."""
    again = Tracker.open(_job("second", tracking, resume_step=5))
    for row in [*_rows(6, 8), {"step": 8, "validation": {"web": 3.5}}, *_rows(9, 9)]:
        again.write(row)
    again.close()


def test_tensorboard_shows_every_step_once_after_a_resume(tmp_path: Path) -> None:
    _stopped({"tensorboard": str(tmp_path)})
    _gone_on({"tensorboard": str(tmp_path)})
    folder = tmp_path / "mini" / NODE
    events = EventAccumulator(str(folder)).Reload()
    assert [(event.step, event.value, event.wall_time) for event in events.Scalars("loss")] == [
        (step, 10.0 - step, 1000.0 + step) for step in range(1, 10)
    ]
    assert [(event.step, event.value) for event in events.Scalars("validation/web")] == [(8, 3.5)]
    assert set(events.Tags()["scalars"]) == {"loss", "validation/web"}
    assert sorted(path.name.rsplit(".", 1)[1] for path in folder.iterdir()) == ["first", "second"]


def _records(data: bytes) -> list[bytes]:
    """Of LevelDB's log format, after a header of seven bytes: in blocks of 32 KiB, pieces of (checksum,
    length, full 1 first 2 middle 3 last 4)."""
    place, records, whole = 7, [], b""
    while place + 7 <= len(data):
        if (left := 32_768 - place % 32_768) < 7:
            place += left
            continue
        _, length, kind = struct.unpack_from("<IHB", data, place)
        if place + 7 + length > len(data):
            break
        whole += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):
            records.append(whole)
            whole = b""
    return records


def _offline_runs(folder: Path) -> list[tuple[str, list[dict[str, float]]]]:
    """(id, rows) of each file that `wandb sync` would send, oldest first."""
    from wandb.proto.wandb_internal_pb2 import Record

    found = []
    for path in sorted(folder.glob("**/*.wandb"), key=lambda path: path.stat().st_mtime):
        name, rows = "", []
        for data in _records(path.read_bytes()):
            record = Record.FromString(data)
            name = record.run.run_id or name
            if record.HasField("history"):
                rows.append(
                    {
                        "/".join(item.nested_key) or item.key: json.loads(item.value_json)
                        for item in record.history.item
                    }
                )
        found.append((name, rows))
    return found


OFFLINE = {"wandb": {"project": "apertus", "mode": "offline", "folder": "kept"}}


def test_weights_and_biases_has_one_run_per_trajectory_with_each_step_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    _stopped(OFFLINE)
    _gone_on(OFFLINE)
    (first, before), (second, after) = _offline_runs(tmp_path / "kept")
    assert first == second == "a" * 32
    assert [(row["_step"], row["loss"]) for row in before] == [(step, 10.0 - step) for step in range(1, 8)]
    assert [(row["_step"], row["loss"], row.get("validation/web")) for row in after] == [
        (8, 2.0, 3.5),
        (9, 1.0, None),
    ]


def test_a_row_that_a_killed_attempt_did_not_write_whole_is_shown_by_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    _stopped(OFFLINE)
    (file,) = {path.resolve() for path in (tmp_path / "kept").glob("**/*.wandb")}
    data = file.read_bytes()
    file.write_bytes(data[: data.rindex(b"loss")])
    _gone_on(OFFLINE)
    (_, before), (_, after) = _offline_runs(tmp_path / "kept")
    assert [row["_step"] for row in before] == [1, 2, 3, 4, 5, 6]
    assert [row["_step"] for row in after] == [7, 8, 9]


def test_the_last_step_is_found_in_a_file_of_many_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    long = Tracker.open(_job("first", OFFLINE))
    for row in _rows(1, 2_000):
        long.write(row)
    long.close()
    assert (
        sum(path.stat().st_size for path in (tmp_path / "kept").glob("*/offline-run-*/*.wandb")) > 10 * 32_768
    )
    assert last_kept_step(tmp_path / "kept", "a" * 32) == 2_000
    assert last_kept_step(tmp_path / "kept", "b" * 32) == -1


def test_a_resumed_run_is_silent_until_it_passes_what_was_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    import wandb

    class Run:
        resumed, step = True, 8  # what Weights & Biases says after step 7

        def __init__(self) -> None:
            self.rows: list[int] = []

        def log(self, values: dict[str, float], step: int) -> None:
            self.rows.append(step)

        def finish(self) -> None: ...

    run = Run()
    monkeypatch.setattr(wandb, "init", lambda **_: run)
    tracker = Tracker.open(_job("second", {"wandb": {"project": "apertus", "folder": "/tmp"}}, resume_step=5))
    for row in _rows(6, 9):
        tracker.write(row)
    assert run.rows == [8, 9]


def test_a_failing_tracker_is_dropped_and_training_continues(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "mini").write_text("a file where a folder is needed")
    tracker = Tracker.open(_job("first", {"tensorboard": str(tmp_path)}))
    tracker.write(_rows(1, 1)[0])
    tracker.close()
    assert len([line for line in caplog.messages if "TensorBoard gets no more metrics" in line]) == 1
