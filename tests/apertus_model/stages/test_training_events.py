"""What a training stage meets beside its steps: events, storage that refuses, data that does not come, the
end of a process."""

import json
import logging
import math
import os
import signal
from pathlib import Path
from typing import Any

import pytest

import apertus_model.stages.train
from apertus_model.stages.train import SegmentCheckpoints
from apertus_model.tracking import Tracker
from apertus_model.trainer import anomalies
from apertus_model.trainer.trainer import ApertusTrainer
from infra.store import Artifact, Store
from infra.store.writing.lease import LeaseLost
from specs.anomalies import Anomalies, remark
from tests.apertus_model.stages.training import SPEC, Stages, weights_of
from tests.infra.moto import Moto
from tests.machine import slow

NAN_AT = 5
SHORT = SPEC.model_copy(
    update={"end_step": 3, "validation": SPEC.validation.model_copy(update={"interval": 0})}
)


@pytest.fixture(scope="module")
def stages(tmp_path_factory: pytest.TempPathFactory) -> Stages:
    return Stages(tmp_path_factory.mktemp("stages"))


@pytest.fixture
def watched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Rows that the tracker was given, a line each."""
    rows = tmp_path / "rows.jsonl"

    def write(tracker: Tracker, row: dict[str, Any]) -> None:
        with open(rows, "a") as file:
            file.write(json.dumps(row) + "\n")

    monkeypatch.setattr(Tracker, "write", write)
    return rows


@pytest.fixture
def one_nan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The loss of step 5 is NaN on every rank, the first time that a process gets there."""
    take = ApertusTrainer._accept_step

    def poisoned(trainer: ApertusTrainer, loss: float, grad_norm: float) -> bool:
        seen = tmp_path / f"seen-{os.environ['RANK']}"
        if trainer.step == NAN_AT and not seen.exists():
            seen.touch()
            loss = math.nan
        return take(trainer, loss, grad_norm)

    monkeypatch.setattr(ApertusTrainer, "_accept_step", poisoned)


def events_of(artifact: Artifact, watched: Path) -> list[list[dict[str, Any]]]:
    """The events in the manifest, in the history, and among the rows that were shown."""
    shown = [json.loads(line) for line in watched.read_text().splitlines()]
    in_rows = [[row for row in rows if "anomaly" in row] for rows in (artifact.history(), shown)]
    assert all((row["step"], row["tokens"]) == (NAN_AT, NAN_AT * 64) for rows in in_rows for row in rows)
    manifest = [
        {name: value for name, value in event.items() if value is not None}
        for event in artifact.manifest.facts["anomalies"]
    ]
    return [
        manifest,
        *(
            [{name: value for name, value in row["anomaly"].items() if value is not None} for row in rows]
            for rows in in_rows
        ),
    ]


def test_a_skipped_step_is_in_the_manifest_the_history_and_the_tracker(
    stages: Stages, watched: Path, one_nan: None
) -> None:
    artifact = stages.train("skipped", SPEC.model_copy(update={"anomalies": Anomalies(nonfinite="skip")}))
    manifest, history, shown = events_of(artifact, watched)
    assert manifest == history == shown
    assert [(event["step"], event["quantity"], event["action"]) for event in manifest] == [
        (NAN_AT, "loss", "skip")
    ]
    assert "loss" not in manifest[0] and manifest[0]["grad_norm"] > 0


def test_an_unusual_gradient_norm_is_in_manifest_history_and_tracker_also_when_training_is_resumed(
    stages: Stages, watched: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    take = ApertusTrainer._accept_step

    def spiking(trainer: ApertusTrainer, loss: float, grad_norm: float) -> bool:
        return take(trainer, loss, grad_norm * (100 if trainer.step == NAN_AT else 1))

    monkeypatch.setattr(anomalies, "REPORT_LEAST", 3)
    monkeypatch.setattr(ApertusTrainer, "_accept_step", spiking)
    spec = SPEC.model_copy(update={"norms_interval": 2})
    whole = stages.train("reported", spec)
    manifest, history, shown = events_of(whole, watched)
    assert manifest == history == shown
    assert [(event["quantity"], event["action"]) for event in manifest] == [("grad_norm", "report")]
    assert remark(whole.manifest.facts).startswith("1 anomaly: step 5: the grad norm of ")
    assert [row["step"] for row in whole.history() if "loss" in row] == [1, 2, 3, 4, 5, 6]  # it was taken
    norms = {row["step"]: row["norms"] for row in whole.history() if "norms" in row}
    assert norms.keys() == {2, 4, 6} and norms[6]["weights/layers.0"] > 0

    for stop_after in (4, 5):
        name = f"resumed-{stop_after}"
        step = stages.train(name, spec, stop_after=stop_after).checkpoint_steps()[-1]
        assert step == stop_after  # before and after the event
        resumed = stages.train(name, spec, attempt="second", resume_step=step)
        assert resumed.manifest.facts["anomalies"] == whole.manifest.facts["anomalies"]
        seen, again = ([row for row in one.history() if "loss" not in row] for one in (whole, resumed))
        for kind in ("anomaly", "norms"):
            assert [row for row in seen if kind in row] == [row for row in again if kind in row]


@pytest.mark.parametrize("processes", [1, slow(2)])
def test_the_history_keeps_an_anomaly_that_stopped_training_when_a_later_attempt_passes_it(
    stages: Stages, watched: Path, one_nan: None, processes: int
) -> None:
    name = f"stopped-{processes}"
    launch = {"threads": 1, "processes": processes}
    with pytest.raises(RuntimeError, match=r"AnomalyError: step 5: the loss is not finite; training stops"):
        stages.train(name, SPEC, processes=processes, launch=launch)
    stopped = Artifact(stages.store, f"pretrain/{name}", 6)
    assert stopped.checkpoint_steps() == [3]
    stored = stages.store.read_json(f"pretrain/{name}/units/stop-{NAN_AT:08d}.json")["data"]
    artifact = stages.train(name, SPEC, processes=processes, launch=launch, attempt="second", resume_step=3)
    manifest, history, shown = events_of(artifact, watched)
    assert (
        manifest == history == shown == [{key: value for key, value in stored.items() if value is not None}]
    )
    assert [(event["step"], event["quantity"], event["action"]) for event in manifest] == [
        (NAN_AT, "loss", "stop")
    ]
    assert [row["step"] for row in artifact.history() if "loss" in row] == [1, 2, 3, 4, 5, 6]


def refusing(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def remove(store: Store, path: str) -> None:
        raise error

    monkeypatch.setattr(Store, "remove", remove)


def test_storage_that_removes_nothing_does_not_end_training(
    stages: Stages, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(
        apertus_model.stages.train.logger, "handlers", [logging.FileHandler(tmp_path / "log.txt")]
    )
    refusing(monkeypatch, PermissionError("deleting is forbidden"))
    spec = SHORT.model_copy(
        update={"checkpoint": SHORT.checkpoint.model_copy(update={"interval": 1, "keep": 1})}
    )
    artifact = stages.train("kept", spec)
    assert artifact.complete
    assert artifact.checkpoint_steps() == [1, 2, 3]
    told = "older checkpoints stay until the next commit: PermissionError: deleting is forbidden"
    assert (tmp_path / "log.txt").read_text().splitlines() == [f"step {step}: {told}" for step in (2, 3)]


def test_a_lease_that_was_lost_ends_training_also_when_it_shows_in_housekeeping(
    stages: Stages, monkeypatch: pytest.MonkeyPatch
) -> None:
    refusing(monkeypatch, LeaseLost("taken over"))
    spec = SHORT.model_copy(
        update={"checkpoint": SHORT.checkpoint.model_copy(update={"interval": 1, "keep": 1})}
    )
    with pytest.raises(RuntimeError, match=r"LeaseLost: taken over"):
        stages.train("lost", spec)


def test_a_marker_that_cannot_be_read_stays_and_the_others_go(stages: Stages) -> None:
    spec = SHORT.model_copy(
        update={
            "checkpoint": SHORT.checkpoint.model_copy(update={"interval": 1, "keep": 1, "best": ["val_loss"]})
        }
    )
    stages.store.write_once("pretrain/torn/checkpoints/00000000.json", b'{"step": 0, "att')
    artifact = stages.train("torn", spec)
    assert artifact.complete
    assert artifact.checkpoint_steps() == [0, 3]


def test_the_start_of_a_stage_is_watched_before_its_data_is_opened(
    stages: Stages, monkeypatch: pytest.MonkeyPatch
) -> None:
    def opens(*arguments: Any) -> None:
        raise RuntimeError(f"ends after {signal.getitimer(signal.ITIMER_REAL)[0]:.0f} s")

    monkeypatch.setattr(apertus_model.stages.train, "open_data", opens)
    # three hours and the time for the stacks
    with pytest.raises(RuntimeError, match=r"ends after (10810|10809) s"):
        stages.train("watched", SHORT, launch={"threads": 1, "hang_timeout": "1h"})


def test_killed_training_on_object_storage_ends_with_the_bits_of_training_on_disk(
    stages: Stages, moto: Moto, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("APERTUS_CACHE", str(tmp_path / "cache"))
    commit = SegmentCheckpoints._commit

    def dies(checkpoints: SegmentCheckpoints, *arguments: Any) -> None:
        commit(checkpoints, *arguments)
        os.kill(os.getpid(), signal.SIGKILL)

    with moto.in_environment() as bucket:
        remote = Stages(tmp_path, f"{bucket}/store")
        with monkeypatch.context() as patch:
            patch.setattr(SegmentCheckpoints, "_commit", dies)
            with pytest.raises(AssertionError, match="no answer"):
                remote.train("killed", SPEC)
        killed = Artifact(remote.store, "pretrain/killed", 6)
        assert killed.checkpoint_steps() == [3]
        assert not killed.complete
        resumed, undisturbed = (
            remote.train("killed", SPEC, attempt="second", resume_step=3),
            stages.train("undisturbed", SPEC),
        )
        assert weights_of(resumed, 6) == weights_of(undisturbed, 6)
        losses = [
            [(row["step"], row["loss"]) for row in artifact.history() if "loss" in row]
            for artifact in (resumed, undisturbed)
        ]
        assert losses[0] == losses[1]
        assert len(losses[0]) == 6
