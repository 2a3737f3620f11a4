"""Slurm's commands. Whatever submits, watches or cancels a job does it through this.

Invariant: only options that are stated reach sbatch; a machine without Slurm is an error that says what to do.
"""

from __future__ import annotations

import math
import re
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from specs.errors import StageError
from specs.units import Duration

ENDED = frozenset(
    [
        *("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL"),
        *("OUT_OF_MEMORY", "PREEMPTED", "REVOKED", "TIMEOUT"),
    ]
)  # states that a job does not leave
Options = Mapping[str, str | int | bool | None]


class SlurmError(RuntimeError):
    """A job that could not be submitted, or ended without a result. Another attempt may succeed."""


class SlurmMissing(StageError):
    """This machine has no Slurm."""


def command(*words: str) -> subprocess.CompletedProcess[str]:
    """Runs one of Slurm's commands. SlurmMissing where there is none."""
    try:
        return subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    except FileNotFoundError as error:
        fix = "start the pipeline where Slurm is, or state 'executor: local' and a profile with 'launcher: local'"
        raise SlurmMissing(f"this machine has no '{words[0]}'. Fix: {fix}") from error


def flags(options: Options) -> list[str]:
    """`{"time": 5, "exclusive": True, "mem": None}` as `--time=5 --exclusive`."""
    return [
        f"--{name}" if value is True else f"--{name}={value}" for name, value in options.items() if value is not None and value is not False
    ]


def minutes(span: Duration | None) -> int | None:
    """Slurm counts in minutes; rounded up."""
    return None if span is None else math.ceil(span.seconds / 60)


def submit(script: Path, options: Options) -> str:
    """The number of the job. SlurmError when sbatch refuses."""
    submitted = command("sbatch", "--parsable", *flags(options), str(script))
    if submitted.returncode:
        raise SlurmError(f"sbatch refused the job: {submitted.stderr.strip()}")
    return submitted.stdout.strip().split(";")[0]


def cancel(jobs: Sequence[str]) -> str:
    """Ends jobs; what went wrong, or an empty text."""
    return command("scancel", *jobs).stderr.strip() if jobs else ""


def state(job: str) -> str | None:
    """Slurm's state of a job; `gone` when it knows of none by that number, None when it does not answer."""
    answer = command("squeue", f"--jobs={job}", "--states=all", "--noheader", "--format=%T")
    if answer.returncode:
        return "gone" if "Invalid job id" in answer.stderr else None
    return answer.stdout.split()[0] if answer.stdout.split() else "gone"


def failed_nodes(log: Iterable[str]) -> set[str]:
    """Nodes that srun says in its log have failed."""
    return {match[1] for line in log if (match := re.match(r"srun: error: Node failure on ([\w.-]+)", line))}


def unused_nodes(job: str) -> set[str]:
    """Nodes of a job that Slurm does not use any more."""
    listed = command("squeue", f"--jobs={job}", "--states=all", "--noheader", "--format=%N").stdout.strip()
    if not listed or listed == "(null)":
        return set()
    rows = command("sinfo", "--Node", "--noheader", f"--nodes={listed}", "--format=%N %T").stdout.splitlines()
    unused = ("down", "drain", "fail", "unknown")
    return {name for name, condition in map(str.split, rows) if condition.lower().startswith(unused)}
