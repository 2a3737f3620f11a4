"""When a stage has to stop: signals and the end of its job."""

import os
import signal
import subprocess
import sys
import time

import pytest

from apertus_model.stop import StopSignal, job_end
from specs.errors import StageError


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1"])
def test_a_signal_asks_a_stage_to_stop(name: str) -> None:
    program = """
from apertus_model.stop import StopSignal
stop = StopSignal(); stop.watch(cooperative=True)
print("up", flush=True)
stop.wait(30)
print(stop.reason, flush=True)
"""
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "up\n"
    os.kill(process.pid, signal.Signals[name])
    assert process.stdout.readline() == f"{name}\n"
    assert process.wait(10) == 0


def test_a_signal_is_heard_while_the_main_thread_is_in_a_library() -> None:
    """A rank that waits for its peers at start-up is in C++, where Python runs no handler of signals."""
    program = """
import ctypes
from apertus_model.stop import StopSignal
StopSignal().watch(cooperative=False, tell=lambda reason: print("told", reason, flush=True))
forever = ctypes.CDLL(None).pthread_mutex_lock
mutex = ctypes.create_string_buffer(64)
forever(mutex)
print("up", flush=True)
forever(mutex)  # a second time: no signal ends this
"""
    process = subprocess.Popen(
        [sys.executable, "-c", program],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None and process.stdout.readline() == "up\n"
    os.kill(process.pid, signal.SIGUSR1)
    assert process.stdout.readline() == "told SIGUSR1\n"
    assert process.wait(10) == -signal.SIGKILL


def test_a_rank_that_ends_because_its_peer_died_does_not_count_as_interrupted() -> None:
    """torchrun sends SIGTERM to the others; the end of standard input is the launcher's own doing."""
    program = """
import signal
from apertus_model.stop import StopSignal
StopSignal().watch(cooperative=False, tell=lambda reason: print("told", reason, flush=True))
print("up", flush=True)
while True: signal.pause()
"""
    for end in ("SIGTERM", "pipe"):
        environment = os.environ | {"TORCHELASTIC_RUN_ID": "run"}
        process = subprocess.Popen(
            [sys.executable, "-c", program],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
            env=environment,
        )
        assert (
            process.stdin is not None and process.stdout is not None and process.stdout.readline() == "up\n"
        )
        process.stdin.close() if end == "pipe" else os.kill(process.pid, signal.SIGTERM)
        assert process.stdout.read() == ""
        assert process.wait(10) == -signal.SIGKILL


def test_the_end_of_the_job_comes_from_the_environment() -> None:
    assert job_end({}) is None
    assert job_end({"SLURM_JOB_END_TIME": "1800000000"}) == 1_800_000_000
    assert job_end({"SLURM_JOB_END_TIME": "1800000000", "APERTUS_JOB_END": "1700000000.5"}) == 1_700_000_000.5
    with pytest.raises(StageError, match="APERTUS_JOB_END is 'soon', which is not a unix time"):
        job_end({"APERTUS_JOB_END": "soon"})


def test_a_stage_stops_a_stated_time_before_its_job_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("APERTUS_JOB_END", str(time.time() + 3600))
    early, late = StopSignal(), StopSignal()
    late.before_end(60)
    early.before_end(3599.5)
    assert early.wait(20)
    assert early.reason == "the job ends in 3599.5 s"
    assert not late.requested


def test_without_a_known_end_nothing_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("APERTUS_JOB_END", "SLURM_JOB_END_TIME"):
        monkeypatch.delenv(name, raising=False)
    stop = StopSignal()
    stop.before_end(10)
    assert not stop.wait(0.2)
