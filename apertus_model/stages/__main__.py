"""Entry point of a stage's process: `python -m apertus_model.stages JOB.json`, or the same under torchrun.

Invariant: the module of a kind is found by its name; everything it needs is in the job file; its standard
input is the launcher's pipe. `error.json` tells the launcher about an error, whether another attempt may
succeed, and which checkpoint is damaged, if any; or that the stage was told to stop, which is not an error.
"""

from __future__ import annotations

import importlib
import json
import sys
import traceback
from pathlib import Path
from typing import Any

from apertus_model.progress import Progress
from apertus_model.stop import StopSignal
from infra.store import Attempt
from infra.store.records import DamagedCheckpoint
from specs.errors import StageError
from specs.job import REPORT, Job
from specs.redaction import redacted
from specs.stages import TRAINING

MODULES = dict.fromkeys(TRAINING, "train")  # modules of other kinds have their names
WORTH_ANOTHER_TRY = (OSError, RuntimeError)  # storage, network, collectives, the device; a wrong recipe stays wrong


def main(path: str) -> int:
    job = Job.model_validate_json(Path(path).read_text())
    module = MODULES.get(job.kind, job.kind)
    stop = StopSignal()
    stop.watch(cooperative=False, tell=lambda reason: _tell(job, _interrupted(reason)))
    try:
        stage = importlib.import_module(f"apertus_model.stages.{module}")
        attempt = Attempt(job)
        attempt.begin()
        stage.run(job, attempt, Progress(job.progress), stop)
    except Exception as error:
        message = str(error)
        if not isinstance(error, StageError):
            traceback.print_exc()
            message = f"{type(error).__name__}: {error}"
        message = redacted(message)
        again = isinstance(error, WORTH_ANOTHER_TRY) and not isinstance(error, NotImplementedError)
        _tell(job, {"message": message, "again": again} | _damage(error))
        print(message, file=sys.stderr, flush=True)
        return 1
    if stop.requested and not stop.orphaned:
        _tell(job, _interrupted(stop.reason))
    return 0


def _damage(error: Exception) -> dict[str, Any]:
    """The damaged checkpoint that an error names, if any: the launcher withdraws it and makes another
    attempt."""
    return {"damaged": {"artifact": error.artifact, "step": error.step}} if isinstance(error, DamagedCheckpoint) else {}


def _interrupted(reason: str) -> dict[str, Any]:
    return {"message": reason, "again": False, "interrupted": True}


def _tell(job: Job, error: dict[str, Any]) -> None:
    """Tells the launcher why there is no result."""
    (Path(job.scratch) / "error.json").write_text(json.dumps(error))
    if job.progress == REPORT:
        print(REPORT + json.dumps({"error": error}), flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
