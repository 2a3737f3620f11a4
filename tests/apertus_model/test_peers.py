"""Ranks of several nodes notice each other's end."""

from __future__ import annotations

import itertools
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from apertus_model import peers

RANK = """
import os, pathlib, sys, time
from apertus_model.peers import Peers

class Addresses:
    file = pathlib.Path(sys.argv[1])
    def set(self, key, value):
        self.file.with_suffix(".part").write_text(value)
        self.file.with_suffix(".part").rename(self.file)
    def get(self, key):
        while not self.file.exists():
            time.sleep(0.01)
        return self.file.read_bytes()

def lost(why):
    print(why, flush=True)
    os._exit(3)

with Peers(Addresses(), int(sys.argv[2]), "localhost", lost):
    print("up", flush=True)
    word = sys.stdin.readline()
    if word == "fail\\n":
        raise ValueError
    if word == "exit\\n":
        os._exit(0)
print("finished", flush=True)
sys.stdin.readline()
"""
Rank = subprocess.Popen[str]


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[list[Rank]]:
    """Three, which are in the block, and connected."""
    command = [sys.executable, "-c", RANK, str(tmp_path / "address")]
    streams: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    started = [
        subprocess.Popen([*command, str(rank)], stderr=subprocess.DEVNULL, **streams) for rank in range(3)
    ]
    try:
        assert [line_of(rank) for rank in started] == ["up"] * 3
        yield started
    finally:
        for rank in started:
            rank.kill()
            rank.communicate()


def line_of(rank: Rank) -> str:
    assert rank.stdout is not None
    return rank.stdout.readline().rstrip("\n")


def say(rank: Rank, word: str) -> None:
    assert rank.stdin is not None
    rank.stdin.write(word + "\n")
    rank.stdin.flush()


def killed(rank: Rank) -> None:
    rank.send_signal(signal.SIGKILL)


@pytest.mark.parametrize("one", range(3))
@pytest.mark.parametrize("ends", [killed, lambda rank: say(rank, "fail"), lambda rank: say(rank, "exit")])
def test_the_end_of_one_rank_is_noticed_by_all_others(
    ranks: list[Rank], ends: Callable[[Rank], None], one: int
) -> None:
    ends(ranks[one])
    others = [rank for rank in range(3) if rank != one]
    first = one or 0  # rank 0 tells the others by its own end
    assert [ranks[rank].wait(20) for rank in others] == [3, 3]
    told = {rank: line_of(ranks[rank]) for rank in others}
    assert told[others[0]].startswith(f"rank {first} on ")
    assert told[others[1]].startswith("rank ") and told[others[1]].endswith("cannot be reached")


@pytest.mark.parametrize("order", itertools.permutations(range(3)))
def test_ranks_that_finish_one_after_another_are_not_missed(
    ranks: list[Rank], order: tuple[int, ...]
) -> None:
    for rank in order:
        say(ranks[rank], "finish")
        assert line_of(ranks[rank]) == "finished"
        say(ranks[rank], "end")
        assert ranks[rank].wait(20) == 0
        time.sleep(0.1)


def test_a_rank_that_was_not_followed_yet_is_told_of_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread of rank 0 may be late on a busy machine."""
    monkeypatch.setattr(peers.Peers, "_watch", lambda self: None)
    addresses: dict[str, str] = {}

    class Addresses:
        set = staticmethod(addresses.__setitem__)

    with peers.Peers(Addresses(), 0, "localhost", print):
        port = int(addresses[peers.WHERE].split()[0])
        others = [socket.create_connection(("localhost", port), timeout=20) for _ in range(3)]
    assert [other.recv(100) for other in others] == [peers.FINISHED] * 3


@pytest.mark.parametrize("says", [b"", b"x", b"rank 1 on node1\n", b"x" * 5000])
def test_a_stranger_has_no_effect(ranks: list[Rank], tmp_path: Path, says: bytes) -> None:
    port = int((tmp_path / "address").read_text().split()[0])
    for _ in range(2):
        with socket.create_connection(("localhost", port)) as stranger:
            stranger.sendall(says)
    time.sleep(0.2)
    assert [rank.poll() for rank in ranks] == [None] * 3
    killed(ranks[1])
    assert (ranks[0].wait(20), ranks[2].wait(20)) == (3, 3)


def test_the_kernel_asks_whether_a_silent_machine_is_there() -> None:
    with socket.socket() as connection:
        peers.ask_whether_it_lives(connection)
        assert connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        idle, between, most = (
            connection.getsockopt(socket.IPPROTO_TCP, option)
            for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
        )
    assert idle + between * most == peers.LOST_SECONDS == 60
