"""A process without a heartbeat says where it is, and ends. A whole run of which a rank hangs:
tests/e2e/test_hang.py."""

import signal
import subprocess
import sys
from pathlib import Path


def test_a_process_that_shows_no_heartbeat_leaves_its_stacks_and_ends(tmp_path: Path) -> None:
    program = """
import signal, sys, threading, time
import apertus_model.trainer.hang as hang
hang.GRACE_SECONDS = 1.0
watch = hang.HangWatch(sys.argv[1], 3, 0.5)
watch.heartbeat()
def waits_for_ever():
    threading.Event().wait()
threading.Thread(target=waits_for_ever, daemon=True).start()
def stuck():
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM, signal.SIGINT])
    while True: time.sleep(1)
stuck()
"""
    ended = subprocess.run([sys.executable, "-c", program, str(tmp_path)], timeout=60)
    assert ended.returncode == -signal.SIGALRM
    stacks = (tmp_path / "stacks-3.txt").read_text()
    assert "in stuck" in stacks
    assert "in waits_for_ever" in stacks


def test_signs_of_life_postpone_the_end_and_the_last_one_cancels_it(tmp_path: Path) -> None:
    program = """
import sys, time
import apertus_model.trainer.hang as hang
hang.GRACE_SECONDS = 0.5
watch = hang.HangWatch(sys.argv[1], 0, 1.0)
for _ in range(5):
    watch.heartbeat()
    time.sleep(0.5)
watch.heartbeat()
time.sleep(1.2)  # slow, but not for ever
watch.heartbeat()
watch.close()
time.sleep(2)
"""
    ended = subprocess.run([sys.executable, "-c", program, str(tmp_path)], timeout=60)
    assert ended.returncode == 0
    assert (tmp_path / "stacks-0.txt").read_text() == ""
