"""Jobs as the launcher hands them over, and a stage run in this process."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType
from typing import Any

from apertus_model.progress import Progress
from apertus_model.stages.__main__ import MODULES
from apertus_model.stop import StopSignal
from infra.store import Artifact, Attempt, Store
from specs.job import InputRef, Job


def job_at(path: str, store: Store | str, folder: Path, name: str = "first", **fields: Any) -> Job:
    """An attempt at what is made at that place; what it writes outside the store is in the folder."""
    kind, fingerprint = path.split("/")
    about = {"node": kind, "kind": kind, "version": 1, "fingerprint": fingerprint, "path": path}
    made_of: dict[str, Any] = {"spec": {}, "identity": {}, "inputs": {}, "launch": {}}
    places = {
        "store": store if isinstance(store, str) else store.url,
        "scratch": str(folder / "scratch" / path / name),
        "progress": str(folder / "progress.jsonl"),
    }
    return Job(**about | made_of | places | {"attempt": name} | fields)


def input_at(path: str, step: int | None = None, **fields: Any) -> InputRef:
    """What was made at that place, or a checkpoint of it, as an input."""
    kind, fingerprint = path.split("/")
    return InputRef(kind=kind, fingerprint=fingerprint, path=path, step=step, **fields)


def checkpoint_at(artifact: Artifact, step: int) -> InputRef:
    return input_at(artifact.path, step, checkpoint=artifact.checkpoint(step).folder)


def stage_of(kind: str) -> ModuleType:
    return importlib.import_module(f"apertus_model.stages.{MODULES.get(kind, kind)}")


def run_stage(job: Job, attempt: type[Attempt] = Attempt, stop: StopSignal | None = None) -> Artifact:
    """What the process of a stage does."""
    begun = attempt(job)
    begun.begin()
    stage_of(job.kind).run(begun, Progress(job.progress), stop or StopSignal())
    return begun.artifact
