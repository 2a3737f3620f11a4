"""What is read of the answers of Slurm's commands, which are scripts here; `launchers/test_slurm_job.py` asks
a real Slurm."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from infra import slurm
from infra.slurm import Jobs, SlurmError
from specs.profiles import SlurmProfile
from specs.units import Duration


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], None]:
    """Writes one of Slurm's commands."""
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")

    def write(name: str, line: str) -> None:
        (tmp_path / name).write_text(f"#!/bin/sh\n{line}\n")
        (tmp_path / name).chmod(0o755)

    return write


@pytest.mark.parametrize(
    ("answer", "states"),
    [
        (
            "printf '7 N/A RUNNING\\n8 0 PENDING\\n8 12 FAILED\\n'",
            {"7": "RUNNING", "8_0": "PENDING", "8_12": "FAILED"},
        ),
        ("true", {}),
        ("echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1", {}),
        ("echo 'Socket timed out' >&2; exit 1", None),
    ],
)
def test_states_are_those_of_the_jobs_that_slurm_knows(
    program: Callable[[str, str], None], answer: str, states: dict[str, str] | None
) -> None:
    program("squeue", answer)
    assert Jobs().states() == states


def test_a_command_that_does_not_end_is_no_answer(
    program: Callable[[str, str], None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("squeue", "sbatch"):
        program(name, "exec sleep 600")
    monkeypatch.setattr(slurm, "ANSWER_SECONDS", 0.2)
    assert Jobs().states() is None
    with pytest.raises(SlurmError, match=r"sbatch did not answer for 0\.2 s"):
        Jobs().submit(tmp_path / "job.sh", {})


def test_all_jobs_that_were_submitted_are_asked_for_and_cancelled_together(
    tmp_path: Path, program: Callable[[str, str], None]
) -> None:
    program("sbatch", f"echo x >> {tmp_path}/count; echo \"$(wc -l < {tmp_path}/count | tr -d ' ');cluster\"")
    program("squeue", f'echo "$*" > {tmp_path}/asked')
    program("scancel", f'echo "$*" > {tmp_path}/cancelled')
    jobs = Jobs()
    assert jobs.cancel() == "" and not (tmp_path / "cancelled").exists()
    assert [jobs.submit(tmp_path / "job.sh", {}) for _ in range(2)] == ["1", "2"] == jobs.numbers
    jobs.states()
    assert "--jobs=1,2" in (tmp_path / "asked").read_text().split()
    assert jobs.cancel() == ""
    assert (tmp_path / "cancelled").read_text() == "1 2\n"


def test_a_job_that_was_refused_is_not_one_of_them(
    tmp_path: Path, program: Callable[[str, str], None]
) -> None:
    program("sbatch", "echo no such partition >&2; exit 1")
    jobs = Jobs()
    with pytest.raises(SlurmError, match="sbatch refused the job: no such partition"):
        jobs.submit(tmp_path / "job.sh", {})
    assert jobs.numbers == []


def test_a_job_is_over_for_long_when_nobody_saw_it_run_for_as_long_as_files_may_take(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [0.0]
    monkeypatch.setattr(slurm.time, "monotonic", lambda: now[0])
    jobs = Jobs()

    def looks(*pairs: tuple[float, bool | None]) -> list[bool]:
        found = []
        for moment, over in pairs:
            now[0] = moment
            found.append(jobs.over_for_long("7", over))
        return found

    assert looks((0, False), (5, True), (34, True), (35, True)) == [False, False, False, True]
    assert looks((36, False), (40, True), (69, True), (70, True)) == [False, False, False, True], (
        "it was started again"
    )
    assert looks((80, False), (81, True), (100, None), (110, None), (111, True)) == [
        False,
        False,
        False,
        False,
        True,
    ]
    assert not jobs.over_for_long("8", True), "of another job nothing is known"


def test_options_that_are_not_stated_are_left_out_and_what_the_profile_adds_is_kept(tmp_path: Path) -> None:
    always = ["--job-name=n", f"--output={tmp_path}/log", "--open-mode=append", "--export=ALL"]
    assert slurm.flags(slurm.options(SlurmProfile(), "n", tmp_path / "log", None, None, None)) == always
    profile = SlurmProfile(
        partition="fast", arguments={"account": "team", "exclusive": True, "oversubscribe": False}
    )
    stated = slurm.flags(slurm.options(profile, "n", tmp_path / "log", 4, "8G", Duration(61.0)))
    assert sorted(stated) == sorted(
        [
            *always,
            "--account=team",
            "--exclusive",
            "--cpus-per-task=4",
            "--mem=8G",
            "--partition=fast",
            "--time=2",
        ]
    )
