"""Slurm's commands for nodes of one machine. They are NOT Slurm: sbatch, srun and the others are shell
scripts that start the script of a node there, and end nothing."""

from __future__ import annotations

import os
from pathlib import Path

from tests.e2e.nodes import Nodes

PROFILE = "launcher: slurm\n"
COMMANDS = {
    "sbatch": r"""
for word; do case $word in --output=*) output=${word#--output=} ;; esac; script=$word; done
job=1; while ! mkdir "$JOBS/$job" 2> /dev/null; do job=$((job + 1)); done
echo RUNNING > "$JOBS/$job/state"
export SLURM_JOB_ID=$job SLURM_JOB_NODELIST=all
setsid sh -c 'bash "$0" && state=COMPLETED || state=FAILED; echo $state > "$1/end"; mv "$1/end" "$1/state"' \
    "$script" "$JOBS/$job" > "$output" 2>&1 < /dev/null &
echo "$job"
""",
    "squeue": r"""cd "$JOBS" && for job in *; do echo "$job N/A $(cat "$job/state")"; done""",
    "scancel": "true",
    "sinfo": "true",
    "scontrol": "echo node1",
    "srun": r"""
while case $1 in --nodes=*) nodes=${1#--nodes=} ;; --*) ;; *) false ;; esac; do shift; done
pids=
for node in $(seq "$nodes"); do
    SLURM_NODEID=$((node - 1)) "$ON_NODE" "$node" "$@" &
    pids="$pids $!"
done
code=0; for pid in $pids; do wait "$pid" || code=$?; done; exit "$code"
""",
}


class Jobs:
    """The jobs that are submitted by the commands in a folder, to whoever has its `environment`."""

    def __init__(self, folder: Path, nodes: Nodes) -> None:
        self._jobs = folder / "jobs"
        self._programs = folder / "bin"
        self.environment = {
            "PATH": f"{self._programs}:{os.environ['PATH']}",
            "JOBS": str(self._jobs),
            "ON_NODE": str(nodes.program),
        }
        for made in (self._jobs, self._programs):
            made.mkdir(parents=True)
        for name, text in COMMANDS.items():
            program = self._programs / name
            program.write_text(f"#!/bin/sh\n{text}\n")
            program.chmod(0o755)

    @property
    def submitted(self) -> int:
        return len(list(self._jobs.iterdir()))
