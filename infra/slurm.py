"""Describes, submits, watches, explains and cancels Slurm jobs, through Slurm's commands.

Every Slurm job belongs to a `Jobs`: the attempt at a stage (`infra.launchers.slurm_job`), the workers of a
stage (`apertus_model.work.cluster`). Those add what they run, and what its end means for them.

Invariant: only options that are stated reach sbatch; on a machine without Slurm, the error says what to do.
"""

import math
import re
import shlex
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterable, Mapping
from pathlib import Path

from infra.liveness import ROOT
from specs.errors import StageError
from specs.profiles import Profile, SlurmProfile
from specs.units import Duration

ENDED = frozenset(
    [
        *("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL"),
        *("OUT_OF_MEMORY", "PREEMPTED", "REVOKED", "TIMEOUT"),
        "gone",  # our word for a job that Slurm does not know any more
    ]
)  # states that a job does not leave
ENDED_BY_CLUSTER = {
    "TIMEOUT": "its time limit was reached",
    "DEADLINE": "its deadline was over",
    "PREEMPTED": "it was preempted",
    "NODE_FAIL": "a node failed",
    "BOOT_FAIL": "a node did not start",
}
POLL_SECONDS = 5.0
ANSWER_SECONDS = 120.0  # of a command, whose own patience with a busy controller is shorter
LOG_LINES = 20  # that an error shows
VISIBLE_SECONDS = 30.0  # a shared folder may show files of another machine this late
Options = Mapping[str, str | int | bool | None]


class SlurmError(RuntimeError):
    """A job that could not be submitted, or ended without a result. Another attempt may succeed."""


def command(*words: str) -> subprocess.CompletedProcess[str]:
    """Runs a command of Slurm, which fails after `ANSWER_SECONDS`. StageError where there is none."""
    try:
        return subprocess.run(
            words,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
            timeout=ANSWER_SECONDS,
        )
    except subprocess.TimeoutExpired:
        message = f"{words[0]} did not answer for {ANSWER_SECONDS:g} s"
        return subprocess.CompletedProcess(words, 1, "", message)
    except FileNotFoundError as error:
        fix = (
            "start the pipeline where Slurm is, or set 'executor: local' and a profile with 'launcher: local'"
        )
        raise StageError(f"this machine has no '{words[0]}'. Fix: {fix}") from error


def flags(options: Options) -> list[str]:
    """`{"time": 5, "exclusive": True, "mem": None}` as `--time=5 --exclusive`."""
    return [
        f"--{name}" if value is True else f"--{name}={value}"
        for name, value in options.items()
        if value is not None and value is not False
    ]


def setup_lines(profile: Profile) -> list[str]:
    """The first lines of a job's script: the modules and the setup of the profile."""
    return [*(f"module load {shlex.quote(name)}" for name in profile.modules), *profile.setup]


def exports(profile: Profile, variables: Mapping[str, str]) -> list[str]:
    """The lines of a script that export the profile's variables, others, and the checkout on the nodes."""
    every = {**profile.environment, **variables}
    lines = [f"export {name}={shlex.quote(value)}" for name, value in every.items()]
    return [*lines, f'export PYTHONPATH={checkout(profile)}"${{PYTHONPATH:+:$PYTHONPATH}}"']


def checkout(profile: Profile) -> str:
    """The folder of the checkout on the nodes, quoted for a shell."""
    return shlex.quote(profile.checkout or str(ROOT))


def python(profile: Profile) -> str:
    """The interpreter on the nodes, quoted for a shell."""
    return shlex.quote(profile.python or sys.executable)


def options(
    profile: SlurmProfile,
    name: str,
    output: Path,
    cpus: int | None,
    memory: str | None,
    time_limit: Duration | None,
) -> Options:
    """The options of sbatch of every job. `output`: a file to append to; `cpus`: per task."""
    return {
        **profile.arguments,
        "job-name": name,
        "cpus-per-task": cpus,
        "mem": memory,
        "partition": profile.partition,
        "time": None if time_limit is None else math.ceil(time_limit.seconds / 60),  # Slurm counts in minutes
        "output": str(output),
        "open-mode": "append",
        "export": "ALL",
    }


class Jobs:
    """Slurm jobs that belong together. `numbers`: the numbers of the submitted jobs."""

    def __init__(self) -> None:
        self.numbers: list[str] = []
        self._over: dict[str, float] = {}

    def submit(self, script: Path, options: Options) -> str:
        """Submits a job and returns its number. SlurmError when sbatch refuses it."""
        submitted = command("sbatch", "--parsable", *flags(options), str(script))
        if submitted.returncode:
            raise SlurmError(f"sbatch refused the job: {submitted.stderr.strip()}")
        self.numbers.append(submitted.stdout.strip().split(";")[0])
        return self.numbers[-1]

    def states(self) -> dict[str, str] | None:
        """Slurm's state of each job (`7`) and array element (`7_0`) that it knows; None without an answer."""
        answer = command(
            "squeue",
            f"--jobs={','.join(self.numbers)}",
            "--states=all",
            "--array",
            "--noheader",
            "--format=%F %K %T",
        )
        if answer.returncode and "Invalid job id" not in answer.stderr:
            return None
        rows = (line.split() for line in answer.stdout.splitlines())
        return {job if element == "N/A" else f"{job}_{element}": state for job, element, state in rows}

    def over_for_long(self, name: str, over: bool | None) -> bool:
        """Whether a job has been over so long that its files are visible. `over`: None if not known now."""
        if over is False:
            self._over.pop(name, None)
        now = time.monotonic()
        return bool(over) and now - self._over.setdefault(name, now) >= VISIBLE_SECONDS

    def cancel(self) -> str:
        """Cancels all the jobs. Returns what went wrong, or an empty text."""
        return command("scancel", *self.numbers).stderr.strip() if self.numbers else ""


def last_lines(log: Path) -> str:
    """The last lines of a job's log."""
    with log.open(encoding="utf-8", errors="replace") as file:
        return "".join(deque(file, LOG_LINES)).rstrip() or "(empty)"


def failed_nodes(log: Iterable[str]) -> set[str]:
    """The nodes that have failed according to srun's log."""
    return {match[1] for line in log if (match := re.match(r"srun: error: Node failure on ([\w.-]+)", line))}


def unused_nodes(job: str) -> set[str]:
    """The nodes of a job that Slurm does not use any more."""
    listed = command("squeue", f"--jobs={job}", "--states=all", "--noheader", "--format=%N").stdout.strip()
    if not listed or listed == "(null)":
        return set()
    rows = command("sinfo", "--Node", "--noheader", f"--nodes={listed}", "--format=%N %T").stdout.splitlines()
    unused = ("down", "drain", "fail", "unknown")
    return {name for name, condition in map(str.split, rows) if condition.lower().startswith(unused)}
