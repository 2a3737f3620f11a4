"""OpenStack Swift with its S3 interface on the loopback address: proxy, account, container and object server
with one device each.

A storage server as clusters run it, from PyPI, in about two seconds and without root: rings with one
partition holder, one process per server, all children of this module run as a program. `Memory` stands for
the memcached of a cluster, without which the proxy asks the account and the container server about every
request.

Invariants: what was stored before `stop` or `kill` is there after `start`, under the same address; nothing is
left running when the process that called `start` is gone.
"""

from __future__ import annotations

import http.client
import json
import math
import os
import pwd
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.infra.s3 import Server

ROOT = Path(__file__).parents[2]
SERVERS = ("account", "container", "object", "proxy")
ACCOUNT, USER, KEY = "test", "tester", "testing"
CONFIGURATION = """\
[DEFAULT]
bind_ip = 127.0.0.1
bind_port = {port}
workers = 0
user = {user}
swift_dir = {folder}
devices = {folder}/devices
mount_check = false
disable_fallocate = true
log_level = ERROR
max_clients = 1024

[pipeline:main]
pipeline = {pipeline}

[app:{server}-server]
use = egg:swift#{server}
account_autocreate = true
object_chunk_size = 1048576
client_chunk_size = 1048576
disk_chunk_size = 1048576
network_chunk_size = 1048576
conn_timeout = 5
node_timeout = 30
"""
MIDDLEWARE = {
    "catch_errors": "",
    "memory": "",
    "listing_formats": "",
    "bulk": "",
    "s3api": "min_segment_size = 1\n",
    "tempauth": f"user_{ACCOUNT}_{USER} = {KEY} .admin\n",
    "copy": "",
    "slo": "",
    "dlo": "",
    "versioned_writes": "",
    "symlink": "",
}


class Swift(Server):
    """A cluster whose data lies in `folder`, which must be on a filesystem with extended attributes."""

    access_key, secret_key = f"{ACCOUNT}:{USER}", KEY

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.ports = _free_ports(len(SERVERS))
        self._process: subprocess.Popen[bytes] | None = None
        (folder / "devices" / "disk").mkdir(parents=True)
        _configure(folder, dict(zip(SERVERS, self.ports, strict=True)))

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.ports[-1]}"

    def start(self, timeout: float = 30) -> None:
        """Returns when the proxy answers and reaches its servers."""
        assert self._process is None, "it runs already"
        with open(self.folder / "log.txt", "ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__, str(self.folder)], cwd=ROOT, stdin=subprocess.PIPE,
                stdout=log, stderr=log,
                start_new_session=True,
            )  # fmt: skip
        deadline = time.monotonic() + timeout
        while not all(_answers(port) for port in self.ports):
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"Swift did not start:\n{(self.folder / 'log.txt').read_text()}")
            time.sleep(0.02)

    def stop(self) -> None:
        """Ends all its processes at once, in whatever they are doing: kill -9, as when the machine fails."""
        if self._process is not None:
            # to end its input is not enough: processes that were forked from this one hold it open
            self._process.communicate(b"stop")
            self._process = None

    @contextmanager
    def gone(self) -> Iterator[None]:
        """It is not there while this lasts."""
        self.stop()
        try:
            yield
        finally:
            self.start()


def obstacle(folder: Path) -> str:
    """Why there can be no Swift with its data in a folder, or an empty text."""
    try:
        pwd.getpwuid(os.getuid())
        os.setxattr(folder, "user.swift", b"")
    except KeyError:
        return f"Swift is run by a user with a name, and user {os.getuid()} has none"
    except OSError as error:
        return f"Swift keeps extended attributes, which {folder} cannot have ({error.strerror}): set TMPDIR"
    os.removexattr(folder, "user.swift")
    return ""


def _configure(folder: Path, ports: dict[str, int]) -> None:
    (folder / "swift.conf").write_text(
        "[swift-hash]\nswift_hash_path_suffix = tests\nswift_hash_path_prefix = tests\n"
    )
    user = pwd.getpwuid(os.getuid()).pw_name
    for server, port in ports.items():
        middleware = MIDDLEWARE if server == "proxy" else {}
        text = CONFIGURATION.format(
            port=port,
            user=user,
            folder=folder,
            server=server,
            pipeline=" ".join([*middleware, f"{server}-server"]),
        )
        for name, options in middleware.items():
            use = "call:tests.infra.swift:with_memory" if name == "memory" else f"egg:swift#{name}"
            text += f"\n[filter:{name}]\nuse = {use}\n{options}"
        (folder / f"{server}.conf").write_text(text)


def _answers(port: int) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        connection.request("OPTIONS", "/")
        connection.getresponse()
    except OSError:
        return False
    finally:
        connection.close()
    return True


def _free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [found.getsockname()[1] for found in sockets]
    for found in sockets:
        found.close()
    return ports


def serve(folder: Path) -> None:
    """Runs the servers, a process each, until something comes on standard input or it ends, which it does
    with the processes that hold the other end."""
    from swift.common import utils

    utils.set_swift_dir(str(folder))
    utils.validate_hash_conf()
    if not (folder / "object.ring.gz").exists():
        _build_rings(folder)
    children = []
    for server in SERVERS:
        child = os.fork()
        if child == 0:
            os._exit(_run(folder, server))
        children.append(child)
    sys.stdin.buffer.read(1)
    for child in children:  # each has made a session of its own
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def _build_rings(folder: Path) -> None:
    from configparser import ConfigParser

    from swift.common.ring import RingBuilder

    for server in SERVERS[:-1]:
        configuration = ConfigParser()
        configuration.read(folder / f"{server}.conf")
        port = configuration.getint("DEFAULT", "bind_port")
        builder = RingBuilder(part_power=2, replicas=1, min_part_hours=0)
        builder.add_dev(
            {
                "id": 0,
                "region": 1,
                "zone": 1,
                "ip": "127.0.0.1",
                "port": port,
                "device": "disk",
                "weight": 1.0,
            }
        )
        builder.rebalance(seed=1)
        builder.get_ring().save(str(folder / f"{server}.ring.gz"))


class Memory:
    """The part of Swift's client of memcached that its proxy uses, kept in this process. What is read is a
    copy, as from memcached."""

    def __init__(self) -> None:
        self._kept: dict[str, tuple[float, str]] = {}

    def get(self, key: str, **_: Any) -> Any:
        until, value = self._kept.get(key, (0.0, "null"))
        return json.loads(value) if time.monotonic() < until else None

    def set(self, key: str, value: Any, **options: Any) -> None:
        seconds = options.get("time") or math.inf
        self._kept[key] = time.monotonic() + seconds, json.dumps(value)

    def delete(self, key: str, **_: Any) -> None:
        self._kept.pop(key, None)


def with_memory(_: Any, **__: Any) -> Callable[[Any], Any]:
    """A filter of the proxy's pipeline, as Swift's `cache` is one."""
    memory = Memory()

    def around(app: Any) -> Any:
        def answer(environment: dict[str, Any], start: Any) -> Any:
            environment["swift.cache"] = memory
            return app(environment, start)

        return answer

    return around


def _run(folder: Path, server: str) -> int:
    from swift.common.wsgi import run_wsgi
    from swift.obj.server import global_conf_callback

    options = {"global_conf_callback": global_conf_callback} if server == "object" else {}
    return int(run_wsgi(str(folder / f"{server}.conf"), f"{server}-server", **options))


if __name__ == "__main__":
    serve(Path(sys.argv[1]))
