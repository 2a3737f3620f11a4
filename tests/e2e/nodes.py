"""Nodes on one machine: network namespaces with addresses and host names of their own, and the wire between
them, which can lose packets or be slow.

They want root and a kernel with TUN. Everything is removed at the end, whatever happened in between.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import heapq
import itertools
import os
import select
import shutil
import signal
import struct
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from infra.liveness import started

PROGRAMS = ("ip", "nsenter", "unshare", "setsid")
NETWORK = 0x40000000  # CLONE_NEWNET
ATTACH, TUN = 0x400454CA, 0x0001 | 0x1000  # TUNSETIFF; IFF_TUN | IFF_NO_PI

ON_NODE = r"""#!/bin/sh
node=$1; shift
exec nsenter --net="/run/netns/%s$node" unshare --mount --uts sh -c \
    'mount --bind "$0" /etc/hosts && hostname "$1" && shift && exec "$@"' "%s" "node$node" "$@"
"""


class Wire(threading.Thread):
    """Brings packets from node to node, each by its interface."""

    def __init__(self, interfaces: dict[int, int]) -> None:
        super().__init__(name="wire", daemon=True)
        self.delay = 0.0  # seconds, of every packet
        self.lost: set[int] = set()  # nodes that no packet reaches
        self._interfaces = interfaces
        self._over = False

    def run(self) -> None:
        waiting: list[tuple[float, int, bytes]] = []
        numbers = itertools.count()
        while not self._over:
            for ready in select.select(self._interfaces.values(), [], [], 0.002 if waiting else 0.1)[0]:
                with contextlib.suppress(OSError):  # is down
                    entry = (time.monotonic() + self.delay, next(numbers), os.read(ready, 65536))
                    heapq.heappush(waiting, entry)
            while waiting and waiting[0][0] <= time.monotonic():
                packet = heapq.heappop(waiting)[2]
                node = packet[19]  # the last byte of the address that an IPv4 packet goes to
                if packet[0] >> 4 == 4 and node in self._interfaces and node not in self.lost:
                    with contextlib.suppress(OSError):
                        os.write(self._interfaces[node], packet)

    def end(self) -> None:
        self._over = True
        self.join()
        for interface in self._interfaces.values():
            os.close(interface)


class Nodes:
    """`node1` and so on, with the addresses 10.77.0.1 and so on."""

    def __init__(self, count: int, folder: Path) -> None:
        self.prefix = f"apertus-{os.getpid()}-"
        self.numbers = range(1, count + 1)
        self.program = folder / "on-node"
        self.wire: Wire

    def begin(self) -> None:
        self.program.parent.mkdir(parents=True)
        hosts = self.program.parent / "hosts"
        names = "".join(f"10.77.0.{node} node{node}\n" for node in self.numbers)
        hosts.write_text(f"127.0.0.1 localhost\n{names}")
        self.program.write_text(ON_NODE % (self.prefix, hosts))
        self.program.chmod(0o755)
        interfaces = {}
        for node in self.numbers:
            ip("netns", "add", self._name(node))
            interfaces[node] = tun(self._name(node))
            ip("-n", self._name(node), "address", "add", f"10.77.0.{node}/24", "dev", "eth0")
            for interface in ("lo", "eth0"):
                ip("-n", self._name(node), "link", "set", interface, "up")
        self.wire = Wire(interfaces)
        self.wire.start()

    def end(self) -> None:
        for node in self.numbers:
            self.kill(node)
        if hasattr(self, "wire"):
            self.wire.end()
        for node in self.numbers:
            ip("netns", "delete", self._name(node), check=False)

    def on(self, node: int, *words: str) -> list[str]:
        """The command that runs another on a node."""
        return [str(self.program), str(node), *words]

    def processes(self, node: int) -> dict[int, int]:
        """The processes of a node, with the times at which they started."""
        pids = map(int, ip("netns", "pids", self._name(node), check=False).split())
        return {pid: start for pid in pids if (start := started(pid)) is not None}

    def kill(self, node: int) -> None:
        """kill -9 of all that runs there."""
        while processes := self.processes(node):
            for pid in processes:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.05)

    def link(self, node: int, state: str) -> None:
        """Sets the interface of a node `up` or `down`."""
        ip("-n", self._name(node), "link", "set", "eth0", state)

    def _name(self, node: int) -> str:
        return f"{self.prefix}{node}"


def ip(*words: str, check: bool = True) -> str:
    return subprocess.run(["ip", *words], check=check, capture_output=True, text=True, timeout=30).stdout


def tun(namespace: str) -> int:
    """Makes the interface `eth0` of a network namespace; whoever reads the result has what is sent there."""
    made: list[int] = []

    def make() -> None:  # a thread has a namespace of its own
        with open(f"/run/netns/{namespace}") as there:
            if ctypes.CDLL(None, use_errno=True).setns(there.fileno(), NETWORK):
                raise OSError(ctypes.get_errno(), f"setns {namespace}")
        device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        fcntl.ioctl(device, ATTACH, struct.pack("16sH22x", b"eth0", TUN))
        made.append(device)

    thread = threading.Thread(target=make)
    thread.start()
    thread.join()
    return made[0]


def obstacle() -> str:
    """Why there can be no nodes here; empty if they can be."""
    if os.geteuid() != 0:
        return "network namespaces are made as root only"
    if absent := [name for name in PROGRAMS if shutil.which(name) is None]:
        return f"no {', '.join(absent)}: apt-get install --no-install-recommends iproute2 util-linux"
    if not Path("/dev/net/tun").exists():
        return "no /dev/net/tun: the kernel has no TUN interfaces"
    name = f"apertus-{os.getpid()}-0"
    try:
        ip("netns", "add", name)
        subprocess.run(["unshare", "--uts", "true"], check=True, capture_output=True)
    except subprocess.CalledProcessError as error:
        return f"no namespaces on this machine: {error.stderr!s:.200}"
    finally:
        ip("netns", "delete", name, check=False)
    return ""


@contextlib.contextmanager
def nodes(count: int, folder: Path) -> Iterator[Nodes]:
    """Skips the test where there can be none."""
    if reason := obstacle():
        pytest.skip(reason)
    made = Nodes(count, folder)
    try:
        made.begin()
        yield made
    finally:
        made.end()
