"""Entry point of a stage's process: `python -m apertus_model.stages JOB.json`, or the same under torchrun.

Invariant: the kind of the stage determines its module; everything the stage needs is in the job file; its
standard input is the launcher's pipe. `error.json` tells the launcher about an error, whether another attempt
may succeed, and which checkpoint is damaged, if any; or that the stage was told to stop, which is no error.
"""

import contextlib
import importlib
import os
import sys
import traceback
from datetime import timedelta
from pathlib import Path

from apertus_model.failure import failure_of
from apertus_model.peers import Peers
from apertus_model.progress import Progress
from apertus_model.stop import StopSignal, kill_group
from infra.imports import quick_imports
from infra.store import Attempt
from infra.store.scratch import keep_folder
from specs.errors import StageError
from specs.job import ERROR, Failure, Job
from specs.stages import TRAINING

MODULES = dict.fromkeys(TRAINING, "train")  # every other kind has a module of its own name


def main(path: str) -> int:
    job = Job.model_validate_json(Path(path).read_text())
    keep_folder(job.scratch)
    module = MODULES.get(job.kind, job.kind)
    stop = StopSignal()
    stop.watch(cooperative=False, tell=lambda reason: _tell(job, Failure(message=reason, interrupted=True)))
    try:
        with quick_imports():
            stage = importlib.import_module(f"apertus_model.stages.{module}")
        attempt = Attempt(job)
        attempt.begin()
        with _other_nodes(job):
            stage.run(attempt, Progress(job.progress), stop)
    except Exception as error:
        if not isinstance(error, StageError):
            traceback.print_exc()
        failure = failure_of(error)
        _tell(job, failure)
        print(failure.message, file=sys.stderr, flush=True)
        return 1
    if stop.requested and not stop.orphaned:
        _tell(job, Failure(message=stop.reason, interrupted=True))
    return 0


def _other_nodes(job: Job) -> contextlib.AbstractContextManager[object]:
    """A context in which this process ends when another node is lost. torchrun starts the ranks, and ends
    all ranks of a node when one of them has ended, so one rank per node watches."""
    on_node = os.environ.get("LOCAL_WORLD_SIZE")  # set by torchrun
    if on_node in (None, os.environ.get("WORLD_SIZE")) or os.environ["LOCAL_RANK"] != "0":
        return contextlib.nullcontext()
    from torch.distributed import TCPStore

    def lost(why: str) -> None:
        if not (Path(job.scratch) / ERROR).exists():  # the error for which the lost rank ended
            _tell(job, Failure(message=why, again=True))
        print(why, file=sys.stderr, flush=True)
        kill_group()

    host = os.environ["MASTER_ADDR"]
    begins = timedelta(minutes=10)  # rank 0 may begin this much later than this rank
    store = TCPStore(host, int(os.environ["MASTER_PORT"]), is_master=False, timeout=begins)
    return Peers(store, int(os.environ["RANK"]), host, lost)


def _tell(job: Job, failure: Failure) -> None:
    """Tells the launcher why there is no result."""
    (Path(job.scratch) / ERROR).write_text(failure.model_dump_json())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
