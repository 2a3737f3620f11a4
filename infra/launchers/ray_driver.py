"""Has the stage of a job placed on a Ray cluster, and follows it:

    python -m infra.launchers.ray_driver JOB.json SETTINGS

It prints what the stage prints, and writes how the stage ended into the job's scratch folder. At the end of
its standard input it tells the stage to stop.

Invariant: the stage is told to stop, and has its time to commit, also when nobody reads what this process
prints.
"""

import contextlib
import json
import sys
import threading
from pathlib import Path

from infra.launchers.ray_job import RayJob
from infra.launchers.ray_process import ENDED, ENDED_FILE
from infra.liveness import wait_for_end
from infra.store.scratch import keep_folder
from specs.errors import StageError
from specs.job import ERROR, Failure, Job


def main(path: str, settings: str) -> int:
    job = Job.model_validate_json(Path(path).read_text())
    scratch = Path(job.scratch)
    keep_folder(job.scratch)
    try:
        attempt = RayJob(job, job.launch, job.profile, **json.loads(settings))
        threading.Thread(target=_end_with_run, args=(attempt,), daemon=True).start()
        ended = attempt.run(_say)
    except (StageError, OSError, RuntimeError) as error:
        failure = Failure(message=str(error), again=not isinstance(error, StageError))
        (scratch / ERROR).write_text(failure.model_dump_json())
        print(error, file=sys.stderr, flush=True)
        return 1
    (scratch / ENDED_FILE).write_bytes(ENDED.dump_json(ended))
    return 0


def _say(line: str) -> None:
    with contextlib.suppress(OSError):  # nobody listens to a run that was killed: its stage may commit
        print(line, flush=True)


def _end_with_run(attempt: RayJob) -> None:
    wait_for_end()
    attempt.stop("the run has ended, or asked for it")


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
