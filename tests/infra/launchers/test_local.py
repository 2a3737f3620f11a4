"""Starting and ending the process of a stage."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from infra.launchers import local, warm
from infra.launchers.local import TAIL_LINES, Ended, Process, Started, start_process
from infra.launchers.warm import StageServer
from specs.job import Failure, ProgressRow
from specs.launch import Launch
from specs.units import Duration
from tests.jobs import job_at


class Script(Process):
    """A launcher whose stage is a few lines of Python."""

    def __init__(self, folder: Path, program: str, **launch: Any) -> None:
        folder.mkdir(exist_ok=True)
        job = job_at("script/f", str(folder), folder, node="stage", scratch=str(folder))
        super().__init__(job, Launch(processes=1, threads=3, **launch), distributed=False)
        self.program = program
        self.lines: list[str] = []
        self.rows: list[ProgressRow] = []

    def start(self, job_file: Path, say: Callable[[str], None]) -> Started | None:
        return start_process(self.command(job_file), self.environment())

    def command(self, job_file: Path) -> list[str]:
        return [sys.executable, "-c", self.program, str(job_file)]

    def go(self) -> Ended:
        return self.run(self.lines.append, self.rows.append)


@pytest.mark.parametrize("distributed", [True, False])
def test_a_rank_that_a_signal_ended_is_reported(distributed: bool, tmp_path: Path) -> None:
    """As an error of a GPU ends one: torchrun's last line is a rule."""
    torchrun = [
        "-m",
        "torch.distributed.run",
        "--nproc-per-node=1",
        "--rdzv-backend=c10d",
        "--rdzv-endpoint=localhost:0",
    ]
    program = tmp_path / "program.py"
    program.write_text("import os, signal; print('up'); os.kill(os.getpid(), signal.SIGSEGV)")
    words = [sys.executable, *(torchrun if distributed else []), str(program)]
    done = subprocess.run(words, capture_output=True, text=True)
    output = (done.stdout + done.stderr).splitlines()
    found = Ended(done.returncode, "", tuple(output[-TAIL_LINES:]), None).last_words
    assert re.fullmatch(r"Signal 11 \(SIGSEGV\) received by PID \d+" if distributed else "up", found)


def test_a_process_that_printed_only_rules_said_nothing() -> None:
    assert Ended(1, "", ("====", ""), None).last_words == "it printed nothing"


ENDS_WITH_STDIN = "import sys; print('up', flush=True); sys.stdin.read(); print('told to stop', flush=True)"


def test_lines_progress_threads_and_exit_code_reach_the_launcher(tmp_path: Path) -> None:
    program = """
import json, os, sys
job = json.load(open(sys.argv[1]))
open(job["progress"], "a").write(json.dumps({"done": 1, "total": 2, "unit": "x", "metrics": {}}) + "\\n")
print("threads", os.environ["OMP_NUM_THREADS"])
sys.exit(7)
"""
    process = Script(tmp_path, program)
    ended = process.go()
    assert (ended.code, ended.stopped, ended.error) == (7, "", None)
    assert process.lines == ["threads 3"]
    assert process.rows == [ProgressRow(done=1, total=2, unit="x")]
    assert (tmp_path / "log.txt").read_text() == "threads 3\n"


def test_an_error_that_the_stage_left_is_read(tmp_path: Path) -> None:
    program = """
import json, pathlib
pathlib.Path("SCRATCH/error.json").write_text(json.dumps({"message": "no", "again": False}))
""".replace("SCRATCH", str(tmp_path))
    assert Script(tmp_path, program).go().error == Failure(message="no")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1])
def test_a_stage_that_a_signal_ended_was_told_to_stop(tmp_path: Path, number: signal.Signals) -> None:
    """Before it listened, that is; a stage that listens says so itself. What else ends a process is a
    crash."""
    told = Failure(message=number.name, interrupted=True)
    assert Script(tmp_path, f"import os; os.kill(os.getpid(), {int(number)})").go().error == told
    assert Script(tmp_path, f"import os; os.kill(os.getpid(), {int(signal.SIGKILL)})").go().error is None


@pytest.mark.parametrize(
    ("message", "interrupted"),
    [("SignalException: Process 12 got signal: 10", True), ("ChildFailedError: rank 0", False)],
)
def test_torchrun_says_that_it_was_told_to_stop(tmp_path: Path, message: str, interrupted: bool) -> None:
    """In the form of `torch.distributed.elastic.multiprocessing.errors.ErrorHandler`; what a rank leaves
    then is a consequence."""
    program = f"""
import json, os, pathlib, sys
error = {{"message": "connection closed", "again": True}}
pathlib.Path("{tmp_path}/error.json").write_text(json.dumps(error))
error = {{"message": {{"message": {message!r}, "extraInfo": {{}}}}}}
pathlib.Path(os.environ["TORCHELASTIC_ERROR_FILE"]).write_text(json.dumps(error))
sys.exit(1)
"""
    error = Script(tmp_path, program).go().error
    assert error is not None and error.interrupted == interrupted


def test_stopping_closes_the_pipe_and_waits_for_the_end(tmp_path: Path) -> None:
    process = Script(tmp_path, ENDS_WITH_STDIN)
    threading.Thread(
        target=lambda: _when(lambda: "up" in process.lines, lambda: process.stop("enough"))
    ).start()
    ended = process.go()
    assert ended.stopped == "enough"
    assert process.lines == ["up", "told to stop"]


def test_a_stage_that_was_stopped_before_it_began_never_begins(tmp_path: Path) -> None:
    process = Script(tmp_path, "print('up')")
    process.stop("too late")
    assert process.go().stopped == "too late"
    assert process.lines == []


class Forked(Script):
    """A launcher that forks its stage if it can."""

    start = Process.start


@pytest.fixture
def stopped_server(monkeypatch: pytest.MonkeyPatch) -> Iterator[StageServer]:
    """The server that stages are to be forked from, which nothing but kill -9 reaches."""
    server = StageServer(os.environ)
    os.kill(server.process.pid, signal.SIGSTOP)
    monkeypatch.setattr(local, "server_for", lambda environment: server)
    yield server
    server.process.kill()
    server.process.wait()


def test_a_stage_whose_server_is_stopped_is_a_process_of_its_own_and_the_log_says_so(
    stopped_server: StageServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(warm, "ANSWER_SECONDS", 0.2)
    process = Forked(tmp_path, "print('up')")
    assert process.go().code == 0
    told = "the stage server has not answered for 0.2 s; this stage is a process of its own"
    assert process.lines == [told, "up"]
    assert (tmp_path / "log.txt").read_text().splitlines() == process.lines


def test_a_stop_does_not_wait_for_a_server_that_is_stopped(
    stopped_server: StageServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(warm, "ANSWER_SECONDS", 3600)
    process = Forked(tmp_path, "print('up')")
    threading.Timer(0.2, process.stop, ["enough"]).start()
    begun = time.monotonic()
    assert process.go().stopped == "enough"
    assert time.monotonic() - begun < 30
    assert process.lines == []


def test_the_time_limit_stops_a_stage(tmp_path: Path) -> None:
    ended = Script(tmp_path, ENDS_WITH_STDIN, time_limit=Duration(0.5)).go()
    assert ended.stopped == "the time limit of 0.5s was reached"


def test_run_waits_for_grandchildren_that_hold_the_output(tmp_path: Path) -> None:
    """A torchrun that is killed leaves ranks behind; they see the end of the pipe, and the launcher waits
    for them."""
    program = f"""
import subprocess, sys, os
subprocess.Popen([sys.executable, "-c", {ENDS_WITH_STDIN!r}])
os.kill(os.getpid(), 9)
"""
    process = Script(tmp_path, program)
    ended = process.go()
    assert ended.code == -9
    assert process.lines == ["up", "told to stop"]


@pytest.mark.parametrize("cooperative", [True, False])
def test_a_stage_notices_that_its_launcher_is_gone(tmp_path: Path, cooperative: bool) -> None:
    """The launcher is killed with -9; the stage ends by itself."""
    stage = f"""
import os, sys, time
sys.path.insert(0, {os.getcwd()!r})
from apertus_model.stop import StopSignal
stop = StopSignal(); stop.watch(cooperative={cooperative})
print("up", os.getpid(), flush=True)
while not ({cooperative} and stop.requested): time.sleep(0.01)
open("{tmp_path}/noticed", "w").write(stop.reason)
"""
    launcher = f"""
import subprocess, sys, time
pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE)
child = subprocess.Popen([sys.executable, "-c", {stage!r}], start_new_session=True, **pipes)
print(child.stdout.readline().decode(), flush=True)
time.sleep(60)
"""
    process = subprocess.Popen([sys.executable, "-c", launcher], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    pid = int(process.stdout.readline().split()[1])
    process.kill()
    process.wait()
    assert _when(lambda: not Path(f"/proc/{pid}").exists(), lambda: None)
    assert (tmp_path / "noticed").exists() == cooperative


def test_a_stage_that_has_something_to_end_elsewhere_ends_by_itself(tmp_path: Path) -> None:
    program = """
from apertus_model.stop import StopSignal
stop = StopSignal(); stop.watch(cooperative=False)
with stop.cooperating():
    print("up", flush=True)
    stop.wait(60)
    print("ended it", flush=True)
"""
    process = Script(tmp_path, program)
    threading.Thread(
        target=_when, args=(lambda: "up" in process.lines, lambda: process.stop("enough"))
    ).start()
    ended = process.go()
    assert (ended.code, process.lines) == (0, ["up", "ended it"])


def test_stacks_that_ranks_left_are_in_the_log_and_the_reason(tmp_path: Path) -> None:
    program = """
import pathlib, sys
pathlib.Path("SCRATCH/stacks-1.txt").write_text("Thread 1:\\n  in step\\n")
pathlib.Path("SCRATCH/stacks-0.txt").write_text("")
print("up", flush=True)
sys.exit(1)
""".replace("SCRATCH", str(tmp_path))
    process = Script(tmp_path, program)
    ended = process.go()
    assert process.lines == ["up", "stacks of rank 1:", "Thread 1:", "  in step"]
    assert (tmp_path / "log.txt").read_text().splitlines() == process.lines
    assert "no step was made for longer than launch.hang_timeout" in ended.stopped


def test_a_stage_has_as_long_for_its_last_checkpoint_as_before_the_end_of_its_job(tmp_path: Path) -> None:
    assert Script(tmp_path, "").grace == 120
    longer = Script(tmp_path, "", stop_before_end=Duration(600))
    assert longer.grace == 630
    told = longer.environment()
    assert (told["APERTUS_STOP_SECONDS"], told["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"]) == ("600", "630")


def _when(condition: Any, then: Any, timeout: float = 20) -> bool:
    deadline = time.monotonic() + timeout
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    then()
    return True
