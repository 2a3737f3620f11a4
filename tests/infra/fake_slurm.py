"""NOT Slurm: three shell scripts named sbatch, squeue and scancel that run a job array as background
processes of this machine.

They know the options that the pipeline uses, in the form in which it uses them. `tests.infra.slurm` has the
real one, and the tests that use this fake run on that one too.
"""

from __future__ import annotations

from pathlib import Path

SBATCH = r"""#!/bin/sh
for word; do
    case $word in
        --array=0-*) last=${word#--array=0-}; last=${last%%%*} ;;
        --output=*) output=${word#--output=} ;;
    esac
    script=$word
done
job=1
while ! mkdir "$FAKE_SLURM/$job" 2>/dev/null; do job=$((job + 1)); done
echo "$*" > "$FAKE_SLURM/$job/arguments.txt"
for element in $(seq 0 "$last"); do
    state=$FAKE_SLURM/$job/$element.state
    if [ -n "$FAKE_SLURM_IS_BLIND" ]; then echo FAILED > "$state"; continue; fi
    echo RUNNING > "$state"
    export SLURM_JOB_ID="$job$element" SLURM_ARRAY_TASK_ID="$element"
    setsid sh -c \
        'if bash "$0" > "$1" 2>&1; then echo COMPLETED; else echo FAILED; fi > "$2.end"; mv "$2.end" "$2"' \
        "$script" "$(echo "$output" | sed "s/%A/$job/; s/%a/$element/")" "$state" > /dev/null 2>&1 &
    echo $! > "$FAKE_SLURM/$job/$element.pid"
done
echo "$job"
"""

SQUEUE = r"""#!/bin/sh
cd "$FAKE_SLURM" || exit 1
jobs='*'
for word; do case $word in --jobs=*) jobs=$(echo "${word#--jobs=}" | tr , ' ') ;; esac; done
for state in $(for job in $jobs; do echo "$job"/*.state; done); do
    element=${state#*/}
    echo "${state%/*} ${element%.state} $(cat "$state")"
done
"""

SCANCEL = r"""#!/bin/sh
for word; do
    case $word in
        --*) ;;
        *)
            element=
            case $word in *_*) element=${word#*_} ;; esac
            for pid in "$FAKE_SLURM/${word%_*}"/${element:-*}.pid; do
                grep -q RUNNING "${pid%.pid}.state" || continue
                kill -s KILL -- "-$(cat "$pid")" && echo CANCELLED > "${pid%.pid}.state"
            done
            ;;
    esac
done
"""


def write_fake_slurm(folder: Path) -> dict[str, str]:
    """The environment in which the three programs are found; `FAKE_SLURM_IS_BLIND` makes tasks fail as on
    a node without the folder."""
    (folder / "bin").mkdir(parents=True)
    (folder / "jobs").mkdir()
    for name, text in {"sbatch": SBATCH, "squeue": SQUEUE, "scancel": SCANCEL}.items():
        program = folder / "bin" / name
        program.write_text(text)
        program.chmod(0o755)
    return {"PATH": f"{folder / 'bin'}:/usr/bin:/bin", "FAKE_SLURM": str(folder / "jobs")}
