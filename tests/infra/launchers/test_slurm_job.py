"""Attempts as Slurm jobs, on a real Slurm of this machine where it can be had."""

from __future__ import annotations

import os
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from infra import slurm
from infra.launchers import launch_job
from infra.launchers.local import TAIL_LINES
from infra.launchers.slurm_job import SlurmJob
from specs.errors import StageError
from specs.launch import Launch
from specs.profiles import Profile
from specs.units import Duration
from tests.infra.launchers.slurm_scripts import Script, job_in

pytestmark = pytest.mark.usefixtures("impatient")
PROFILE = Profile.model_validate(
    {
        "launcher": "slurm",
        "gpus_per_node": 4,
        "modules": ["cuda/12"],
        "setup": ["ulimit -n 4096"],
        "environment": {"NCCL_DEBUG": "WARN"},
        "slurm": {
            "partition": "normal",
            "time_limit": "150s",
            "stop_before_end": "2m",
            "cpus_per_task": 64,
            "memory": "400G",
            "arguments": {"account": "team", "gpus-per-node": 4},
            "srun_arguments": {"container-image": "/images/apertus one.sqsh"},
        },
    }
)


# What is submitted


def test_what_the_profile_says_reaches_sbatch_srun_and_the_nodes(tmp_path: Path) -> None:
    job = SlurmJob(
        job_in(tmp_path), Launch(processes=8, threads=2), PROFILE, distributed=True, exclude=["node7"]
    )
    flags = slurm.flags(job.options())
    asked = {
        "--partition=normal",
        "--time=3",
        "--signal=B:USR1@120",
        "--nodes=2",
        "--ntasks-per-node=1",
        "--cpus-per-task=64",
        "--mem=400G",
    }
    assert asked | {
        "--account=team",
        "--gpus-per-node=4",
        "--exclude=node7",
        "--no-requeue",
        "--job-name=apertus-mini-pretrain/2",
    } <= set(flags)
    script, node = job.script(), job.node_script()
    assert "module load cuda/12\nulimit -n 4096\n" in script
    assert (
        "srun --nodes=2 --ntasks=2 --cpus-per-task=64 --kill-on-bad-exit=1 '--container-image=/images/apertus"
        " one.sqsh' bash" in script
    )
    assert "export NCCL_DEBUG=WARN\n" in node and "export OMP_NUM_THREADS=2\n" in node
    assert (
        '--nnodes=2 --nproc-per-node=4 --node-rank="$SLURM_NODEID" --master-addr="$1"'
        " --master-port=$((20000 + SLURM_JOB_ID % 20000)) " in node
    )
    for text in (script, node):
        assert subprocess.run(["bash", "-n"], input=text, text=True, check=False).returncode == 0


def test_what_is_not_stated_is_left_to_the_cluster(tmp_path: Path) -> None:
    flags = slurm.flags(
        SlurmJob(
            job_in(tmp_path), Launch(processes=1, threads=1), Profile(launcher="slurm"), distributed=True
        ).options()
    )
    assert not [
        flag
        for flag in flags
        if flag.startswith(("--partition", "--time=", "--signal", "--mem", "--cpus", "--exclude"))
    ]


@pytest.mark.parametrize(
    ("launch", "settings", "seconds"),
    [
        ({}, {}, 90),
        ({}, {"time_limit": "1h", "stop_before_end": "10m"}, 600),
        ({}, {"stop_before_end": "10m"}, 90),  # without a limit nothing is announced
        ({"stop_before_end": Duration(900)}, {"time_limit": "1h", "stop_before_end": "10m"}, 900),
    ],
)
def test_a_stage_is_told_the_time_that_it_has_and_everybody_waits_for_longer(
    tmp_path: Path, launch: dict[str, Any], settings: dict[str, str], seconds: int
) -> None:
    profile = Profile.model_validate({"launcher": "slurm", "slurm": settings})
    job = SlurmJob(job_in(tmp_path), Launch(processes=1, threads=1, **launch), profile, distributed=True)
    node = job.node_script()
    assert f"export APERTUS_STOP_SECONDS={seconds}\n" in node
    assert f"export TORCH_ELASTIC_SHUTDOWN_TIMEOUT={seconds + 30}\n" in node
    assert job.grace == seconds + 30


def test_only_what_the_profile_sends_there_goes_to_the_cluster(tmp_path: Path) -> None:
    launch = Launch(processes=1, threads=1)
    assert isinstance(launch_job(job_in(tmp_path), launch, PROFILE, distributed=True), SlurmJob)
    assert not isinstance(launch_job(job_in(tmp_path), launch, PROFILE, distributed=False), SlurmJob)
    everything = PROFILE.model_copy(update={"stages": "all"})
    assert isinstance(launch_job(job_in(tmp_path), launch, everything, distributed=False), SlurmJob)


def test_a_machine_without_slurm_is_an_error_with_the_missing_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(StageError, match="no 'sbatch'"):
        SlurmJob(job_in(tmp_path), Launch(processes=1, threads=1), PROFILE, distributed=True).run(
            print, print
        )


# What becomes of it: a stage of a few lines of Python, on a real Slurm but for what that does not do when it
# is asked to


@pytest.fixture
def answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """NOT Slurm: a job that has run already, whose states squeue tells one after another."""
    folder = tmp_path / "bin"
    folder.mkdir()
    told = (
        rf"sed 's/^/7 N\/A /;1q' {folder}/states; [ $(wc -l < {folder}/states) = 1 ] || sed -i 1d"
        rf" {folder}/states"
    )
    squeue = f'case "$*" in *%N*) echo "nid[001-002]" ;; *) {told} ;; esac'
    for name, line in {
        "sbatch": "echo 7",
        "scancel": "true",
        "squeue": squeue,
        "sinfo": "echo nid001 idle; echo nid002 down",
    }.items():
        (folder / name).write_text(f"#!/bin/sh\n{line}\n")
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    return lambda *states: (folder / "states").write_text("\n".join([*states, ""]))


@pytest.mark.parametrize(
    ("states", "code", "output"),
    [
        (("COMPLETING", "NODE_FAIL"), 1, ""),
        (("RUNNING", "COMPLETING"), 1, "srun: error: Node failure on nid002\n"),
        (("FAILED",), 1, "srun: error: Node failure on nid002\n"),
        # which is what srun 22.05 returns then
        (("COMPLETING",), 0, "srun: error: Node failure on nid002\n"),
    ],
)
def test_a_step_that_failed_with_its_node_is_no_failure_of_the_stage(
    answers: Callable[..., None], tmp_path: Path, states: tuple[str, ...], code: int, output: str
) -> None:
    """The exit code is there before Slurm has the last state of the job, or nobody tells it; the rest of
    the log is of other ranks."""
    answers(*states)
    job = Script(tmp_path / "job", "")
    (job.scratch / "code").write_text(f"{code}\n")
    (job.scratch / "log.txt").write_text(output + "connection closed by peer\n" * TAIL_LINES)
    ended = job.go()
    assert (ended.code, ended.requeue, ended.dead_nodes) == (code, "Slurm job 7: a node failed", ("nid002",))


def test_a_step_that_failed_is_a_failure_of_the_stage(answers: Callable[..., None], tmp_path: Path) -> None:
    answers("RUNNING", "COMPLETING", "FAILED")
    job = Script(tmp_path / "job", "")
    (job.scratch / "code").write_text("1\n")
    (job.scratch / "log.txt").write_text("loss is high since Node failure on x\n")
    ended = job.go()
    assert (ended.code, ended.requeue, ended.dead_nodes) == (1, "", ())


def test_the_log_that_is_stored_holds_no_secret(answers: Callable[..., None], tmp_path: Path) -> None:
    answers("COMPLETED")
    job = Script(tmp_path / "job", "")
    (job.scratch / "code").write_text("0\n")
    (job.scratch / "log.txt").write_text("one\nGET https://h/x?sig=abc failed\ntwo")
    job.go()
    assert (job.scratch / "log.txt").read_text() == "one\nGET https://h/x?sig=*** failed\ntwo"


def test_an_exit_code_that_cannot_be_read_is_a_failure(answers: Callable[..., None], tmp_path: Path) -> None:
    answers("FAILED")
    job = Script(tmp_path / "job", "")
    (job.scratch / "code").write_text("\n")
    assert job.go().code == 1


def test_the_exit_code_of_a_step_that_ends_at_once_is_kept(
    answers: Callable[..., None], tmp_path: Path
) -> None:
    for name, line in {"scontrol": "echo node", "srun": "exit 7"}.items():
        (tmp_path / "bin" / name).write_text(f"#!/bin/sh\n{line}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    job = Script(tmp_path / "job", "")
    job.profile = Profile(setup=["kill() { false; }"])  # the step is gone when it is looked for
    assert subprocess.run(["bash"], input=job.script(), text=True, check=False).returncode == 7
    assert (job.scratch / "code").read_text() == "7\n"


def test_a_job_that_was_told_to_stop_does_not_wait_for_a_slurm_that_is_silent(
    answers: Callable[..., None], tmp_path: Path
) -> None:
    (tmp_path / "bin" / "squeue").write_text("#!/bin/sh\nexit 1\n")
    (tmp_path / "bin" / "scancel").write_text(f"#!/bin/sh\ntouch {tmp_path}/cancelled\n")
    job = Script(tmp_path / "job", "")
    job.grace = 0.2
    threading.Timer(0.3, job.stop, ["enough"]).start()
    ended = job.go()
    assert (ended.stopped, ended.tail[-1]) == ("enough", "Slurm job 7: no answer")
    assert (tmp_path / "cancelled").exists()


def test_a_job_is_cancelled_if_an_error_follows_its_submission(
    answers: Callable[..., None], tmp_path: Path
) -> None:
    answers("PENDING")
    (tmp_path / "bin" / "scancel").write_text(f"#!/bin/sh\necho $* > {tmp_path}/cancelled\n")
    job = Script(tmp_path / "job", "")

    def fails(line: str) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        job.run(fails, job.rows.append)
    assert (tmp_path / "cancelled").read_text() == "7\n"


def test_stacks_that_ranks_left_are_printed_once(answers: Callable[..., None], tmp_path: Path) -> None:
    answers("FAILED")
    job = Script(tmp_path / "job", "")
    (job.scratch / "code").write_text("1\n")
    (job.scratch / "stacks-1.txt").write_text("Thread 1:\n  in step\n")
    ended = job.go()
    assert job.lines[1:] == ["stacks of rank 1:", "Thread 1:", "  in step"]
    assert (job.scratch / "log.txt").read_text().splitlines() == job.lines[1:]
    assert "no step was made for longer than launch.hang_timeout" in ended.stopped
