"""A Ray cluster of this machine, whose nodes are processes."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from infra import ray_cluster


@contextlib.contextmanager
def little_ray(*cpus: int) -> Iterator[Any]:
    """A `ray.cluster_utils.Cluster` of nodes with so many CPUs."""
    from ray.cluster_utils import Cluster

    os.environ |= ray_cluster.QUIET
    first, *others = ({"num_cpus": number, "object_store_memory": 100_000_000} for number in cpus)
    cluster = _begun(lambda: Cluster(True, head_node_args=first | {"include_dashboard": False}))
    try:
        for node in others:
            _begun(lambda node=node: cluster.add_node(**node))
        yield cluster
    finally:
        cluster.shutdown()


def _begun(start: Callable[[], Any], tries: int = 3) -> Any:
    """What is started: on busy cores a node may take longer than the half minute that Ray allows."""
    for left in reversed(range(tries)):
        try:
            return start()
        except Exception as error:  # Ray's class of it is `Exception`
            if not left:
                raise
            print(f"Ray did not start: {error}")


def actors(title: str) -> list[int]:
    """The processes of the actors of a class in clusters of this process."""
    return [
        int(file.parent.name)
        for file in Path("/proc").glob("[0-9]*/cmdline")
        if _text(file).startswith(f"ray::{title}") and _is_ours(int(file.parent.name))
    ]


def no_actor_is_left(title: str, within: float = 10.0) -> bool:
    """Ray ends the actors of a connection when it is closed, which takes them a moment."""
    deadline = time.monotonic() + within
    while actors(title):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def _is_ours(pid: int) -> bool:
    while pid > 1 and pid != os.getpid():
        pid = int((_text(Path(f"/proc/{pid}/stat")).rpartition(")")[2].split() or ["", "0"])[1])
    return pid == os.getpid()


def _text(file: Path) -> str:
    """The content of a file of a process; nothing of one that has ended."""
    try:
        return file.read_text(errors="replace")
    except OSError:
        return ""
