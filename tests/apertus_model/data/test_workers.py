"""No worker outlives its stage."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

STAGE = """
import sys
from typing import NamedTuple
from apertus_model.data.workers import run_tasks

class BusyForEver(NamedTuple):
    folder: str

    def run(self, rank):
        open(f"{self.folder}/{rank}").read()

if __name__ == "__main__":
    list(run_tasks(BusyForEver(sys.argv[1]), [0, 1], 2))
"""


def test_no_worker_survives_a_stage_that_is_killed(tmp_path: Path, deadline: None) -> None:
    script, pipes = tmp_path / "stage.py", [tmp_path / "0", tmp_path / "1"]
    script.write_text(STAGE)
    for pipe in pipes:
        os.mkfifo(pipe)
    stage = subprocess.Popen([sys.executable, str(script), str(tmp_path)], stdout=subprocess.PIPE)
    assert stage.stdout is not None
    # Opening a pipe for writing waits for its reader: from here on both workers wait for what never comes.
    writers = [os.open(pipe, os.O_WRONLY) for pipe in pipes]
    stage.kill()
    # The workers have the same standard output: it ends with the last of them.
    assert stage.stdout.read() == b""
    stage.wait()
    for writer in writers:
        os.close(writer)
