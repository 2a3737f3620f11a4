"""Leases of processes of this machine: a holder that was killed or sleeps is told from one that works."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

from infra.store import Store
from infra.store.writing.lease import Holder, Leases, Timing
from tests.infra.store.writing.leases import PART, claim, elsewhere

HOLDER = """
import sys, time
from infra.store import Store
from infra.store.writing.lease import LeaseLost, Leases, Timing
leases = Leases(Store.open(sys.argv[1]), sys.argv[2], Timing(seconds=float(sys.argv[3])))
lease = leases.claim("process", leases.look())
lost = []
lease.when_lost(lost.append)
with lease:
    print("held", flush=True)
    while not lost:
        time.sleep(0.01)
print(lost[0], flush=True)
"""


def holding_process(store: Store, seconds: float) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", HOLDER, store.url, PART, str(seconds)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


def test_a_holder_of_this_machine_that_was_killed_is_taken_over_at_once(local: Store) -> None:
    process = holding_process(local, 600.0)
    assert claim(local, "second") is None
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # dead, and not reaped yet
    seen = Leases(local, PART).look()
    assert (seen.free, seen.why) == (True, "its process is gone")
    process.communicate()
    assert claim(local, "second") is not None


def test_a_process_that_has_the_number_of_a_dead_one_is_another_process(local: Store) -> None:
    holder = Holder.here("first", 60.0)
    assert not holder.gone
    assert holder.model_copy(update={"started": (holder.started or 0) - 1}).gone
    # of another container nothing is known
    assert not holder.model_copy(update={"started": 0, "namespace": "pid:[1]"}).gone


def test_the_stage_of_a_killed_launcher_may_write_its_last_checkpoint_first(local: Store) -> None:
    stage = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
    assert stage.stdin is not None
    dead = elsewhere(
        local, **{name: getattr(Holder.here("x", 1.0), name) for name in ("boot", "namespace")}, pid=2**22 + 1
    )
    dead.stage_started(os.fstat(stage.stdin.fileno()).st_ino)
    dead.beat()
    seen = Leases(local, PART).look()
    assert (seen.free, seen.why) == (False, "its stage is still ending")
    stage.communicate()
    assert Leases(local, PART).look().free


def test_a_machine_that_wakes_up_finds_its_lease_taken_over(local: Store) -> None:
    process = holding_process(local, 0.4)
    try:
        observer = Leases(local, PART, Timing(seconds=0.4, look=0.1))
        deadline = time.monotonic() + 1.0
        while time.monotonic() < deadline:  # it beats: nobody takes over
            assert not observer.look().free
            time.sleep(0.05)
        os.kill(process.pid, signal.SIGSTOP)
        while not (seen := observer.look()).free:
            time.sleep(0.05)
        assert observer.claim("second", seen) is not None
        os.kill(process.pid, signal.SIGCONT)
        assert process.communicate(timeout=10)[0].startswith("the lease was taken over by attempt second on ")
    finally:
        process.kill()
