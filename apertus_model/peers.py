"""Watches whether the nodes of a stage are still alive.

One rank of each node holds a TCP connection to rank 0, over which the kernel of each side asks every few
seconds whether the other machine answers. So a rank that ended is noticed at once, and a node that is lost or
cut off within `LOST_SECONDS`, however busy Python is, and long before collectives give up. torchrun ends the
other ranks of a node.

Invariants: a rank that left the block without an error is not reported as lost. Connections of other
programs, which do not begin with the key of this attempt, have no effect.
"""

from __future__ import annotations

import contextlib
import resource
import secrets
import selectors
import socket
import threading
from collections.abc import Callable
from typing import Any

IDLE_SECONDS, PROBE_SECONDS, PROBES = 15, 5, 9
LOST_SECONDS = IDLE_SECONDS + PROBE_SECONDS * PROBES
FINISHED = b"finished"
LONGEST = 1000  # bytes that a rank sends
WHERE = "apertus/peers"


class Peers:
    """A watch over the other ranks: inside the block, calls `lost` in a thread when another rank ends without
    having left the block, or its node cannot be reached. `addresses`: a store of torch.distributed, whose
    `get` waits until the key is set; `host`: the node of rank 0."""

    def __init__(self, addresses: Any, rank: int, host: str, lost: Callable[[str], object]) -> None:
        self._addresses = addresses
        self._rank = rank
        self._host = host
        self._lost = lost
        self._key = b""
        self._received: dict[socket.socket, bytes] = {}
        self._selector = selectors.DefaultSelector()
        self._listener: socket.socket | None = None  # of rank 0
        self._accepting = threading.Lock()
        self._finished = False

    def __enter__(self) -> Peers:
        if self._rank == 0:
            self._listen()
        else:
            self._connect()
        threading.Thread(target=self._watch, name="peers", daemon=True).start()
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        if error is not None:  # the connections end with the process, when the error has been reported
            return
        with self._accepting:
            self._finished = True
            for connection in list(self._received):
                with contextlib.suppress(OSError):
                    connection.sendall(FINISHED)
        self._accept()  # the thread may not have come to ranks that have just connected

    def _listen(self) -> None:
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # a descriptor for each node
        dual = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if dual else socket.AF_INET
        listener = socket.create_server(("", 0), family=family, backlog=4096, dualstack_ipv6=dual)
        listener.setblocking(False)
        self._listener = listener
        self._selector.register(listener, selectors.EVENT_READ)
        key, port = secrets.token_hex(16), listener.getsockname()[1]
        self._key = key.encode()
        self._addresses.set(WHERE, f"{port} {key}")

    def _connect(self) -> None:
        port, self._key = self._addresses.get(WHERE).split()
        connection = socket.create_connection((self._host, int(port)))
        self._follow(connection, self._key + f"rank 0 on {self._host}\n".encode())
        connection.sendall(self._key + f"rank {self._rank} on {socket.gethostname()}\n".encode())

    def _follow(self, connection: socket.socket, received: bytes = b"") -> None:
        ask_whether_it_lives(connection)
        self._received[connection] = received
        self._selector.register(connection, selectors.EVENT_READ)

    def _watch(self) -> None:
        while True:
            for ready, _ in self._selector.select():
                assert isinstance(ready.fileobj, socket.socket)
                if ready.fileobj in self._received:
                    self._read(ready.fileobj)
                else:
                    self._accept()

    def _accept(self) -> None:
        """Follows every rank that has connected to this one, if this is rank 0. If rank 0 has left the block,
        it sends each of them FINISHED."""
        with self._accepting, contextlib.suppress(OSError):  # no more; or a peer is gone again
            while self._listener is not None:
                connection = self._listener.accept()[0]
                self._follow(connection)
                if self._finished:
                    connection.sendall(FINISHED)

    def _read(self, connection: socket.socket) -> None:
        try:
            piece = connection.recv(LONGEST)
        except OSError:
            piece = b""
        self._received[connection] += piece
        if piece and len(self._received[connection]) < LONGEST:
            return
        self._selector.unregister(connection)
        received = self._received.pop(connection)
        connection.close()
        if received.startswith(self._key) and not received.endswith(FINISHED) and not self._finished:
            name = received.removeprefix(self._key).partition(b"\n")[0].decode(errors="replace")
            self._lost(f"{name} has ended, or its node cannot be reached")


def ask_whether_it_lives(connection: socket.socket) -> None:
    """Lets the kernel end a connection with an error when the other machine is silent for `LOST_SECONDS`."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, IDLE_SECONDS)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, PROBE_SECONDS)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, PROBES)
