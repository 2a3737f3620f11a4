"""Where there is no Slurm, tests that ask for one are skipped with the reason, and nothing is installed."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from tests.infra import slurm
from tests.infra.slurm import PROGRAMS, little_slurm


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder, which is all of PATH. The tests are root's."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setattr(slurm, "_path", lambda: str(folder))
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    return folder


def program(path: Path, *lines: str) -> None:
    path.write_text("\n".join(["#!/bin/sh", *lines]) + "\n")
    path.chmod(0o755)


def reason(folder: Path) -> str:
    with pytest.raises(pytest.skip.Exception) as skipped, little_slurm(folder / "slurm"):
        raise AssertionError("it started")
    return str(skipped.value)


def test_missing_programs_are_named_with_what_installs_them(programs: Path, tmp_path: Path) -> None:
    program(programs / "apt-get", f"echo > {tmp_path}/installed")
    for name in PROGRAMS[:-2]:
        program(programs / name, "exit 1")
    told = reason(tmp_path)
    packages = "slurmctld slurmd slurm-client munge"
    assert told == f"no slurmd, munged: apt-get install --no-install-recommends {packages}"
    assert not (tmp_path / "installed").exists()


def test_a_daemon_that_ends_by_itself_is_named_with_its_last_words(programs: Path, tmp_path: Path) -> None:
    for name in PROGRAMS:
        program(programs / name, "exec /bin/sleep 600")
    program(programs / "munged", f"echo > {tmp_path}/slurm/munge.socket", "exec /bin/sleep 600")
    program(programs / "sinfo", "exit 1")
    program(programs / "slurmd", "echo up", "echo a", "echo b >&2", "echo no cgroups", "exit 1")
    begun = time.monotonic()
    assert reason(tmp_path) == "slurmd-localhost does not run on this machine: a; b; no cgroups"
    assert time.monotonic() - begun < slurm.UP_SECONDS / 2


def test_a_user_who_is_not_root_gets_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert reason(tmp_path) == "munged and slurmd are started as root only"
