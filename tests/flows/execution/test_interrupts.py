"""The signals that end a run: the first counts, once, and children that have to live on do."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from infra.liveness import STOP_SIGNALS

names = pytest.mark.parametrize("number", STOP_SIGNALS, ids=lambda number: number.name)


def started(program: str, ignored: signal.Signals | None = None, **options: int) -> subprocess.Popen[str]:
    """A process that runs `program` and has said that it is up."""

    def prepare() -> None:
        if ignored is not None:
            signal.signal(ignored, signal.SIG_IGN)

    python = [sys.executable, "-c", program]
    process = subprocess.Popen(python, stdout=subprocess.PIPE, text=True, preexec_fn=prepare, **options)
    assert process.stdout is not None and process.stdout.readline() == "up\n"
    return process


def rest(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.read()


@names
def test_the_first_of_many_signals_is_raised_and_the_others_change_nothing(number: signal.Signals) -> None:
    program = """
import time
from flows.execution import interrupts
interrupts.listen()
try:
    print("up", flush=True)
    time.sleep(60)
except KeyboardInterrupt as error:
    print(error, flush=True)
    time.sleep(0.5)
    interrupts.ignore()
    print("done", flush=True)
    time.sleep(0.5)
"""
    process = started(program)
    assert process.stdout is not None
    process.send_signal(number)
    assert process.stdout.readline() == ("Ctrl-C\n" if number == signal.SIGINT else f"{number.name}\n")
    for _ in range(3):
        for other in STOP_SIGNALS:
            process.send_signal(other)
    assert process.stdout.readline() == "done\n"
    while process.poll() is None:  # through the end of the interpreter
        process.send_signal(number)
    assert process.wait(10) == 0


@pytest.mark.parametrize("ignored", [signal.SIGHUP, signal.SIGINT])
def test_what_the_process_was_started_to_ignore_stays_ignored(ignored: signal.Signals) -> None:
    """By nohup, and by a shell that starts it in the background."""
    program = """
import sys, time
from flows.execution import interrupts
interrupts.listen()
print("up", flush=True)
time.sleep(1)
"""
    process = started(program, ignored)
    process.send_signal(ignored)
    assert process.wait(10) == 0


def test_a_signal_that_came_in_a_callback_is_not_lost() -> None:
    program = """
import signal
from flows.execution import interrupts

class Dropped:
    def __del__(self):
        signal.raise_signal(signal.SIGTERM)

interrupts.listen()
print("up", flush=True)
Dropped()
print("goes on", flush=True)
try:
    interrupts.check()
except KeyboardInterrupt as error:
    print(error)
"""
    process = started(program)
    assert rest(process) == "goes on\nSIGTERM\n"


@pytest.mark.parametrize("listens", [True, False])
def test_a_signal_that_a_library_took_is_taken_back_where_somebody_listened(listens: bool) -> None:
    program = f"""
import signal
from flows.execution import interrupts
if {listens}:
    interrupts.listen()
signal.signal(signal.SIGTERM, lambda *_: print("the library's"))
interrupts.listen_again()
print("up", flush=True)
try:
    signal.raise_signal(signal.SIGTERM)
except KeyboardInterrupt:
    print("ours")
"""
    process = started(program)
    assert rest(process) == ("ours\n" if listens else "the library's\n")


@pytest.mark.parametrize("threads", [0, 1])
def test_what_comes_while_a_process_is_started_is_raised_when_it_is(threads: int) -> None:
    """The mask is of one thread, and the kernel gives the signal to another where there is one."""
    program = f"""
import os, signal, threading, time
from flows.execution import interrupts
interrupts.listen()
for _ in range({threads}):
    threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
print("up", flush=True)
try:
    with interrupts.blocked():
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.2)
        print("started")
    print("goes on")
except KeyboardInterrupt as error:
    print(error)
"""
    process = started(program)
    assert rest(process) == "started\nSIGTERM\n"


def test_only_what_was_started_with_signals_blocked_survives() -> None:
    # in short sleeps: a signal that comes just before one is noticed after it
    sleep = "import time; print('up', flush=True); [time.sleep(0.1) for _ in range(600)]"
    sleeping = [sys.executable, "-c", sleep]
    program = f"""
import subprocess, sys
from flows.execution import interrupts
sleeping = {sleeping!r}
with interrupts.blocked():
    spared = subprocess.Popen(sleeping, stdout=subprocess.PIPE)
mortal = subprocess.Popen(sleeping, stdout=subprocess.PIPE)
spared.stdout.readline(), mortal.stdout.readline()
print("up", flush=True)
print(spared.pid, mortal.pid, flush=True)
sys.stdout.close()
print(mortal.wait(), spared.poll(), file=sys.stderr)
spared.kill()
"""
    for number in STOP_SIGNALS:
        process = started(program, stderr=subprocess.PIPE)
        assert process.stdout is not None
        for pid in map(int, process.stdout.readline().split()):
            os.kill(pid, number)
        assert process.communicate(timeout=20)[1].splitlines()[-1] == f"{-number} None"


def test_a_run_whose_terminal_has_closed_ends_as_any_other(tmp_path: Path) -> None:
    """Writing to it fails from then on, and what is printed at the end is lost."""
    program = f"""
import sys, time
from flows.execution import interrupts
interrupts.listen()
try:
    print("up", flush=True)
    time.sleep(60)
except KeyboardInterrupt as error:
    print("interrupted", flush=True)
    open({str(tmp_path / "ended")!r}, "w").write(str(error))
    sys.exit(130)
"""
    try:
        pid, terminal = pty.fork()
    except OSError as error:
        pytest.skip(f"no terminal to close: {error}")
    if pid == 0:
        os.execv(sys.executable, [sys.executable, "-c", program])
    output = b""
    while b"up" not in output:
        output += os.read(terminal, 100)
    os.close(terminal)
    deadline = time.monotonic() + 20
    while (ended := os.waitpid(pid, os.WNOHANG))[0] == 0 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert ended[0] == pid and os.waitstatus_to_exitcode(ended[1]) == 130
    assert (tmp_path / "ended").read_text() == "SIGHUP"
