"""Slurm jobs whose stage is a program of a few lines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from infra.launchers import Ended
from infra.launchers.slurm_job import SlurmJob
from specs.job import Job, ProgressRow
from specs.launch import Launch
from specs.profiles import Profile
from tests.jobs import job_at


def job_in(folder: Path) -> Job:
    folder.mkdir(parents=True, exist_ok=True)
    about = {"pipeline": "mini", "node": "pretrain/2", "scratch": str(folder)}
    return job_at("pretrain/f", str(folder / "store"), folder, "a", **about)


class Script(SlurmJob):
    """A job whose stage is a program of a few lines; `lines` and `rows` are what came of it."""

    def __init__(self, folder: Path, program: str, **settings: Any) -> None:
        folder.mkdir()
        (folder / "program.py").write_text(program)
        profile = Profile.model_validate({"launcher": "slurm", "slurm": settings})
        super().__init__(job_in(folder), Launch(processes=1, threads=1), profile, distributed=False)
        self.lines: list[str] = []
        self.rows: list[ProgressRow] = []

    def node_script(self) -> str:
        return (
            super()
            .node_script()
            .replace(f"-m apertus_model.stages {self.scratch}/job.json", str(self.scratch / "program.py"))
        )

    def go(self) -> Ended:
        return self.run(self.lines.append, self.rows.append)
