"""An attempt at a stage on a Ray cluster, as the run sees it: a process of this machine
(`infra.launchers.ray_driver`) that has the stage placed, and follows it.

It is a process of its own, since Ray ends the process of a driver whose cluster does not answer any more.

Invariant: it ends with the run, however that ends, and tells the stage before that it must commit.
"""

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from infra.launchers.local import END_SECONDS, Ended, Process, start_process
from infra.liveness import stop_signals_blocked
from specs.job import Job
from specs.launch import Launch

ENDED: TypeAdapter[Ended] = TypeAdapter(Ended)
ENDED_FILE = "ended.json"


class RayProcess(Process):
    """`settings`: the arguments of `infra.launchers.ray_job.RayJob`."""

    def __init__(self, job: Job, launch: Launch, *, distributed: bool, **settings: Any) -> None:
        super().__init__(job, launch, distributed=distributed)
        self._settings = settings

    @property
    def grace(self) -> float:
        return super().grace + END_SECONDS  # it ends the stage before

    def start(self, job_file: Path, say: Callable[[str], None]) -> subprocess.Popen[bytes]:
        settings = json.dumps({"distributed": self.distributed, **self._settings})
        words = [sys.executable, "-m", "infra.launchers.ray_driver", str(job_file), settings]
        with stop_signals_blocked():  # they are for the run, which tells it by its standard input
            return start_process(words, self.environment())

    def _keep_to_limit(self, *, waits: bool = False) -> None:
        """The process does that: time in which it waits for nodes does not count."""

    def _ended(self, code: int, tail: tuple[str, ...]) -> Ended:
        """The end of the stage, if the process has noted it; else its own: Ray then tells the stage to stop,
        and where it had made a step, it commits."""
        ended, file = super()._ended(code, tail), Path(self.job.scratch) / ENDED_FILE
        if not file.exists():
            steps = self.distributed and Path(self.job.progress).stat().st_size
            return replace(ended, commits_for=self.grace) if steps else ended
        told = ENDED.validate_json(file.read_bytes())
        return replace(told, stopped=ended.stopped or told.stopped, tail=tail, error=ended.error)
