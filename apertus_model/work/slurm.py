"""Workers as elements of Slurm job arrays. Their logs are `work/logs/<job>_<element>.txt` in the attempt's
scratch folder, which the nodes see too.

datatrove's `SlurmPipelineExecutor` is not used: it passes the pipeline as a pickle, does not record our
counts, names only the last of several jobs, so that the others cannot be cancelled, and always submits a job
that merges statistics.
"""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

from infra import slurm
from specs.job import Job
from specs.launch import Workers

MOST = 1000  # the most elements of a job; Slurm's own limit is 1001 unless configured


class JobArrays:
    """The arrays of the workers of a stage. `MOST`: elements of one; `cpus`: of each worker."""

    def __init__(self, job: Job) -> None:
        self.MOST, self.POLL_SECONDS = MOST, slurm.POLL_SECONDS
        self._job = job
        self._profile = job.profile.slurm
        self._workers = job.launch.workers or Workers()
        self._folder = Path(job.scratch) / "work"
        self._jobs = slurm.Jobs()
        self._names: dict[str, str] = {}  # Slurm's names of the jobs, by number
        self.cpus = self._workers.cpus or (self._profile.cpus_per_task if job.gpus else None) or 1

    def submit(self, number: int, shares: str, workers: int) -> None:
        """Submits array `number`, whose element `i` runs `apertus_model.work.worker STORE shares i`.
        SlurmError when sbatch refuses it, SlurmMissing when there is no sbatch."""
        logs = self._folder / "logs"
        logs.mkdir(exist_ok=True)
        script = self._folder / f"workers-{number}.sh"
        profile, settings = self._job.profile, self._workers
        module = shlex.join(["-m", "apertus_model.work.worker", self._job.store, shares])
        lines = [
            "#!/bin/bash",
            *slurm.setup_lines(profile),
            *slurm.exports(profile, {}),
            f'exec {slurm.python(profile)} {module} "$SLURM_ARRAY_TASK_ID"',
        ]
        script.write_text("\n".join([*lines, ""]))
        limit = f"%{settings.count}" if settings.count is not None else ""
        bounds = self.cpus, settings.memory, settings.time_limit
        usual = slurm.options(self._profile, "apertus-workers", logs / "%A_%a.txt", *bounds)
        options = {**usual, "array": f"0-{workers - 1}{limit}", "ntasks": 1}
        if self._job.gpus and not any("gpus" in name or name == "gres" for name in self._profile.arguments):
            options["gpus-per-task"] = self._job.gpus
        self._names[str(number)] = self._jobs.submit(script, options)

    def states(self) -> dict[str, str] | None:
        """Slurm's state of each worker, by `<number>-<index>`; None when it does not answer."""
        states = self._jobs.states()
        if states is None:
            return None
        numbers = {name: number for number, name in self._names.items()}
        elements = ((element.partition("_"), state) for element, state in states.items())
        return {f"{numbers[job]}-{index}": state for (job, _, index), state in elements if index}

    def over(self, worker: str, state: str) -> bool:
        """Whether a worker in this state has ended, and everything that it committed is visible."""
        return self._jobs.over_for_long(worker, state in slurm.ENDED)

    def explanation(self, worker: str, state: str) -> str:
        """How a worker ended, as far as Slurm and its log tell."""
        number, _, index = worker.partition("-")
        element = f"{self._names[number]}_{index}"
        log = self._folder / "logs" / f"{element}.txt"
        lost = f"the worker of Slurm job {element} ({state})"
        if not log.exists():
            return (
                f"{lost} left neither units nor a log in {self._folder}."
                " Fix: use a scratch folder and a store that the nodes see at the same path"
                " (APERTUS_SCRATCH, --store), if it was not cancelled"
            )
        ended = f"{lost} ended before its units were committed"
        return f"{ended}; its log ends:\n{slurm.last_lines(log)}"

    def end(self, *, finished: bool) -> str:
        """Cancels the jobs, unless all workers have ended. Returns their names, for people."""
        if not finished and (problem := self._jobs.cancel()):
            print(f"scancel {' '.join(self._jobs.numbers)} failed: {problem}", file=sys.stderr, flush=True)
        return f"the Slurm jobs {', '.join(self._jobs.numbers)}"
