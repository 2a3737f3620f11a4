"""Signs of life: files that change, pipes that end, processes of this machine."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from infra import liveness
from infra.liveness import (
    STOP_SIGNALS,
    Beats,
    FileSilence,
    Silence,
    beats_in_file,
    is_running,
    reads_pipe,
    started,
    wait_for_end,
)


def clock_of(*moments: float) -> Silence:
    """An observer that allows 60 s between two looks, and whose clock shows these moments."""
    return Silence(60.0, iter(moments).__next__)


def test_silence_is_the_time_since_the_first_look_that_saw_the_last_sign() -> None:
    silence = clock_of(100, 130, 160, 170, 180)
    assert [silence.after(sign) for sign in (None, None, None, "1", "1")] == [0, 30, 60, 0, 10]


@pytest.mark.parametrize("sign", [None, "", b"", 0, (1, "a")])
def test_the_first_look_sees_no_silence_whatever_the_sign(sign: object) -> None:
    assert clock_of(1e9).after(sign) == 0


def test_an_observer_that_slept_counts_the_longest_gap_at_most() -> None:
    silence = clock_of(0, 3600, 3630, 9000)
    assert [silence.after("1") for _ in range(4)] == [0, 60, 90, 150]


def test_a_sign_that_comes_back_is_a_change() -> None:
    silence = clock_of(0, 10, 20, 30)
    assert [silence.after(sign) for sign in ("1", "2", "1", "1")] == [0, 0, 0, 10]


def test_a_file_that_is_written_again_and_again_is_not_silent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(liveness, "BEAT_SECONDS", 0.01)
    file = tmp_path / "alive"
    observer = FileSilence(file)
    seen = set()
    with beats_in_file(file):
        deadline = time.monotonic() + 10
        while len(seen) < 5:
            assert observer.seconds() < 5
            seen.add(file.read_text())
            assert time.monotonic() < deadline
    last = file.read_text()
    time.sleep(0.05)
    assert file.read_text() == last
    observer.seconds()
    time.sleep(0.02)
    assert observer.seconds() >= 0.02


@pytest.mark.parametrize("removed", [False, True], ids=["never there", "removed"])
def test_a_file_that_cannot_be_read_has_not_changed(tmp_path: Path, removed: bool) -> None:
    file = tmp_path / "alive"
    observer = FileSilence(file)
    if removed:
        file.write_text("0")
    assert observer.seconds() == 0
    file.unlink(missing_ok=True)
    time.sleep(0.02)
    assert observer.seconds() >= 0.02


def test_the_writer_of_a_file_that_cannot_be_written_continues(tmp_path: Path) -> None:
    with beats_in_file(tmp_path / "gone" / "alive"):
        pass
    assert not (tmp_path / "gone").exists()


def test_beats_come_regularly_at_once_when_asked_and_not_after_the_end() -> None:
    came = threading.Event()
    with Beats(came.set, 600.0, "beats") as beats:
        assert not came.wait(0.05)
        beats.now()
        assert came.wait(10)
        came.clear()
    assert not came.is_set()
    with Beats(came.set, 0.01, "beats"):
        assert came.wait(10)


def test_a_pipe_ends_with_its_last_writer_and_not_with_what_is_written() -> None:
    reading, writing = os.pipe()
    over = threading.Event()

    def wait() -> None:
        wait_for_end(reading)
        over.set()

    threading.Thread(target=wait, daemon=True).start()
    os.write(writing, b"x" * 10_000)
    assert not over.wait(0.05)
    os.close(writing)
    assert over.wait(10)
    os.close(reading)


def test_a_process_is_known_by_its_number_and_its_start() -> None:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    assert process.stdin is not None
    start = started(process.pid)
    assert start is not None and is_running(process.pid, start)
    assert not is_running(process.pid, start - 1), "another process had the number before"
    inode = os.fstat(process.stdin.fileno()).st_ino
    assert reads_pipe(inode)
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert not is_running(process.pid, start), "it waits to be reaped"
    process.communicate()
    assert not is_running(process.pid, start)
    assert not reads_pipe(inode)


GUARDED = """
import sys, time
from infra.liveness import start_guard
guard = start_guard(["/bin/sh", "-c", "read _; echo over > $0", sys.argv[1]])
print(guard.pid, flush=True)
time.sleep(600)
"""


def test_a_guard_acts_when_its_process_was_killed_and_no_signal_that_ends_a_run_ends_it(
    tmp_path: Path,
) -> None:
    note = tmp_path / "note"
    process = subprocess.Popen([sys.executable, "-c", GUARDED, str(note)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    guard = int(process.stdout.readline())
    for number in STOP_SIGNALS:
        os.kill(guard, number)
    time.sleep(0.1)
    assert not note.exists()
    process.send_signal(signal.SIGKILL)
    assert process.stdout.read() == "", "the guard holds no output of the process"
    deadline = time.monotonic() + 10
    while not note.exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.wait()
