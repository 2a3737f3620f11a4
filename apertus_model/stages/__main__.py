"""Entry point of a stage's process: `python -m apertus_model.stages JOB.json`, or the same under torchrun.

Invariant: the module of a kind is found by its name; everything it needs is in the job file; its standard input is the
launcher's pipe. An error is left in `error.json` for the launcher, which does not try again after a `StageError`.
"""

from __future__ import annotations

import importlib
import json
import sys
import traceback
from pathlib import Path

from apertus_model.progress import Progress
from apertus_model.stop import StopSignal
from infra.store import Attempt
from specs.errors import StageError
from specs.job import Job

MODULES = {"pretrain": "train", "cooldown": "train"}  # the other kinds have a module of their own name
COOPERATIVE = {"train"}  # they end by themselves, with a checkpoint


def main(path: str) -> int:
    job = Job.model_validate_json(Path(path).read_text())
    module = MODULES.get(job.kind, job.kind)
    stop = StopSignal()
    stop.watch(cooperative=module in COOPERATIVE)
    try:
        stage = importlib.import_module(f"apertus_model.stages.{module}")
        attempt = Attempt(job)
        attempt.begin()
        stage.run(job, attempt, Progress(job.progress), stop)
    except Exception as error:
        again = not isinstance(error, StageError)
        if again:
            traceback.print_exc()
        document = {"type": type(error).__name__, "message": str(error), "again": again}
        (Path(job.scratch) / "error.json").write_text(json.dumps(document))
        print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
